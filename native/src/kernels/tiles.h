// The tile registers of a matrix unit (AMX), and their instructions.
//
//     configuration    rows and bytes of a row, for each of 8 tiles; held by a `Configured` in scope
//     load, store      a tile from memory and back, rows `stride` bytes apart
//     multiply         sums [rows][outputs] += rows [rows][pairs] * weights [pairs][outputs], pairs of bfloat16
//
// The instructions are inline assembly for two reasons. The compiler's intrinsics take a tile only as a literal,
// so a template could not name one. And those of gcc 12 do not declare the memory that they read, so gcc may
// drop or move the stores that fill it.
//
// On a machine without the unit, the native tests run the same kernels over an emulation with the same
// names: native/tests/emulated_tiles.h.
#pragma once

#if defined(__AMX_BF16__) || defined(QUIRE_EMULATE_TILES)
#define QUIRE_HAS_TILES 1
#else
#define QUIRE_HAS_TILES 0
#endif

#if QUIRE_HAS_TILES

#include <cstddef>
#include <cstdint>

#include "quire/kernels.h"

namespace quire::QUIRE_ISA::tiles {

constexpr int kNumTiles = 8, kMostRows = 16, kRowBytes = 64;

// The format of the instruction's operand.
struct alignas(64) Configuration {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64);

}  // namespace quire::QUIRE_ISA::tiles

#if defined(QUIRE_EMULATE_TILES)
#include "emulated_tiles.h"
#else

namespace quire::QUIRE_ISA::tiles {

// All tiles are zero afterwards.
QUIRE_INLINE void configure(const Configuration& configuration) {
    asm volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
}

QUIRE_INLINE void release() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
QUIRE_INLINE void load(const void* from, std::size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
QUIRE_INLINE void store(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kSums, int kRows, int kWeights>
QUIRE_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kWeights));
}

}  // namespace quire::QUIRE_ISA::tiles

#endif  // QUIRE_EMULATE_TILES

namespace quire::QUIRE_ISA::tiles {

// Configures the tiles of this thread, and releases them at the end of the scope: a thread that holds tiles
// takes longer to switch to and from, and keeps its core from sleeping deeply.
class Configured {
  public:
    explicit Configured(const Configuration& configuration) { configure(configuration); }
    ~Configured() { release(); }
    Configured(const Configured&) = delete;
    Configured& operator=(const Configured&) = delete;
};

}  // namespace quire::QUIRE_ISA::tiles

#endif  // QUIRE_HAS_TILES
