// CRC-32 with the polynomial of zlib: the checksum of blocks on disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// The checksum of `size` bytes behind bytes whose checksum is `before`; 0: there are none. Any processor, but only one
// that multiplies without carries is faster than zlib.
std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0);

// The same byte by byte, to be compared with.
std::uint32_t plain_crc32(const void* data, std::size_t size, std::uint32_t before = 0);

}  // namespace quire
