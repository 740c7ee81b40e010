// Randomness without state: one uniform number per (seed, position).
#pragma once

#include <cstdint>

namespace quire {

// Uniform in [0, 1), a multiple of 2^-53. Neighbouring seeds and positions give unrelated numbers.
double uniform(std::uint64_t seed, std::uint64_t position);

}  // namespace quire
