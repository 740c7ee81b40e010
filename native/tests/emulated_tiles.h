// The tile registers of native/src/kernels/tiles.h in plain C++, for machines without them, as the processor
// manual describes the instructions. If the processor would fault, the program prints the reason and ends.
//
//     LDTILECFG, TILERELEASE    configure, release
//     TILELOADD, TILESTORED     load, store
//     TDPBF16PS                 multiply
//
// Included by tiles.h, in files that are compiled with QUIRE_EMULATE_TILES and their own QUIRE_ISA.
#pragma once

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace quire::QUIRE_ISA::tiles {

struct EmulatedTile {
    int rows = 0, row_bytes = 0;  // both 0: not configured
    alignas(kRowBytes) std::byte data[kMostRows][kRowBytes] = {};
};

struct EmulatedTiles {
    bool configured = false;
    std::array<EmulatedTile, kNumTiles> tiles;
};

// Per thread, like the processor's.
inline thread_local EmulatedTiles emulated;

[[noreturn]] inline void fault(const char* what) {
    std::fprintf(stderr, "a tile instruction faults: %s\n", what);
    std::abort();
}

inline void fault_if(bool wrong, const char* what) {
    if (wrong) fault(what);
}

inline void release() { emulated = EmulatedTiles(); }

inline void configure(const Configuration& configuration) {
    const auto all_zero = [](const auto* first, const auto* end) {
        for (; first != end; ++first) {
            if (*first != 0) return false;
        }
        return true;
    };
    fault_if(configuration.palette > 1, "there is no such palette");
    release();
    if (configuration.palette == 0) return;
    fault_if(!all_zero(configuration.reserved, configuration.reserved + 14), "a reserved byte is not zero");
    fault_if(!all_zero(configuration.row_bytes + kNumTiles, configuration.row_bytes + 16) ||
                 !all_zero(configuration.rows + kNumTiles, configuration.rows + 16),
             "there are eight tiles");
    for (int i = 0; i < kNumTiles; ++i) {
        EmulatedTile& tile = emulated.tiles[i];
        tile.rows = configuration.rows[i];
        tile.row_bytes = configuration.row_bytes[i];
        fault_if(tile.rows > kMostRows, "a tile has too many rows");
        fault_if(tile.row_bytes > kRowBytes, "rows of a tile are too long");
        fault_if((tile.rows == 0) != (tile.row_bytes == 0), "a tile has rows without bytes, or bytes without rows");
    }
    emulated.configured = true;
}

inline EmulatedTile& emulated_tile(int index) {
    fault_if(!emulated.configured, "tiles are not configured");
    EmulatedTile& tile = emulated.tiles[index];
    fault_if(tile.rows == 0, "this tile is not configured");
    return tile;
}

template <int kTile>
void load(const void* from, std::size_t stride) {
    EmulatedTile& tile = emulated_tile(kTile);
    std::memset(tile.data, 0, sizeof tile.data);
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(tile.data[row], static_cast<const std::byte*>(from) + row * stride, tile.row_bytes);
    }
}

template <int kTile>
void store(void* to, std::size_t stride) {
    const EmulatedTile& tile = emulated_tile(kTile);
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(static_cast<std::byte*>(to) + row * stride, tile.data[row], tile.row_bytes);
    }
}

// Subnormal numbers count as zero, and become zero, with the same sign.
inline float flushed(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0F, value) : value;
}

inline float of_bfloat16(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return flushed(value);
}

template <int kSums, int kRows, int kWeights>
void multiply() {
    fault_if(kSums == kRows || kSums == kWeights || kRows == kWeights, "two operands are one tile");
    EmulatedTile& sums = emulated_tile(kSums);
    const EmulatedTile &rows = emulated_tile(kRows), &weights = emulated_tile(kWeights);
    fault_if(sums.row_bytes % 4 != 0 || rows.row_bytes % 4 != 0 || weights.row_bytes % 4 != 0,
             "rows of a tile hold no whole numbers");
    fault_if(sums.rows != rows.rows, "sums and rows differ in their rows");
    fault_if(sums.row_bytes != weights.row_bytes, "sums and weights differ in their outputs");
    fault_if(rows.row_bytes / 4 != weights.rows, "rows and weights differ in their pairs");
    using Halves = std::uint16_t[kRowBytes / 2];
    const auto halves = [](const EmulatedTile& tile, int row) -> const Halves& {
        return *reinterpret_cast<const Halves*>(tile.data[row]);
    };
    for (int m = 0; m < sums.rows; ++m) {
        float parts[2][kMostRows] = {};
        for (int k = 0; k < weights.rows; ++k) {
            for (int n = 0; n < sums.row_bytes / 4; ++n) {
                for (int i = 0; i < 2; ++i) {
                    parts[i][n] = flushed(std::fma(of_bfloat16(halves(rows, m)[2 * k + i]),
                                                   of_bfloat16(halves(weights, k)[2 * n + i]), parts[i][n]));
                }
            }
        }
        auto* row = reinterpret_cast<float*>(sums.data[m]);
        for (int n = 0; n < sums.row_bytes / 4; ++n) {
            row[n] = flushed(flushed(row[n]) + flushed(parts[0][n] + parts[1][n]));
        }
    }
}

}  // namespace quire::QUIRE_ISA::tiles
