// Randomness without state: one uniform number per (seed, position).
#pragma once

#include <cstdint>

namespace quire {

// Returns a multiple of 2^-53 in [0, 1). Neighbouring seeds and positions give unrelated numbers.
double uniform(std::uint64_t seed, std::uint64_t position);

}  // namespace quire
