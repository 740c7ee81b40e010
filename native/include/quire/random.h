// Randomness without state: a number for each (seed, position, token). The definition, in Python, is
// quire.compute.sampling.token_numbers.
#pragma once

#include <cstdint>

#include "quire/kernels.h"

namespace quire {

// Returns the key of the numbers of a position. Neighbouring seeds and positions have unrelated keys.
DrawKey draw_key(std::uint64_t seed, std::uint64_t position);

// Returns the upper 32 bits of the numbers of tokens. `Words` is std::uint32_t, or a vector of them.
template <typename Words>
QUIRE_INLINE Words upper_bits(const Words& tokens, const DrawKey& key) {
    Words words = (tokens ^ key.first) * 0x21f0aaadU;
    words = (words ^ (words >> 15)) + key.second;
    words *= 0xd35a2d97U;
    words = (words ^ (words >> 15)) * 0x31848babU;
    return words ^ (words >> 14);
}

// Returns the number of a token: an odd multiple of 2^-53, so its logarithm is below 0.
double number_of(std::uint32_t token, const DrawKey& key);

}  // namespace quire
