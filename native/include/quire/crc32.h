// CRC-32 with zlib's polynomial: the checksum of blocks on disk.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// The checksum of `size` bytes after bytes whose checksum is `before`; 0: no earlier bytes. Runs on any processor, but
// is faster than zlib only with carry-less multiplication.
std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0);

// The same, byte by byte, for comparison.
std::uint32_t plain_crc32(const void* data, std::size_t size, std::uint32_t before = 0);

}  // namespace quire
