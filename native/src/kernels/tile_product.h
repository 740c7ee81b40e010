// Products of bfloat16 by a matrix unit: the rows of a block go through a chunk in tiles.
//
//     tile of sums       rows x 16 outputs      One instruction multiplies 32 inputs of up to 16 rows with those of
//     tile of rows       rows x 16 pairs        16 outputs. Weights lie in panels as the tile wants them: a row of
//     tile of weights    16 pairs x 16 outputs  it is a pair of inputs of 16 outputs.
//
//     up to 16 rows      1 x 4 tiles of sums: the rows are loaded once for four panels
//     more               2 x 2 tiles of sums: two loads of rows and two of weights for four products
//
// In a tile the first inputs of the pairs are added up in order, so are the second ones, and both together are
// added to the sum of the row. That is another order than the one of AVX-512, so every number of rows goes this
// way. Tiles begin at multiples of 32 inputs, wherever chunks and spans begin.
//
// Rows are shared out over tiles of one size, so that a block needs one configuration: 17 rows are two tiles of 9,
// and one row of the second is nobody's. Whatever stands there, it reaches no sum but its own, which nobody reads.
#pragma once

#include <cstring>
#include <utility>

#include "panels.h"
#include "tiles.h"

namespace quire::QUIRE_ISA {

// What a block of rows needs besides ordinary registers: for most numbers nothing.
template <typename Number>
struct BlockTiles {
    explicit BlockTiles(int) {}
    // Rows of scratch memory that so many rows take.
    static int rows_taken(int num_rows) { return num_rows; }
};

#if QUIRE_HAS_TILES

// The rows of a block and some panels, in a chunk.
struct TileChunk {
    const std::uint32_t* rows;  // pairs, zeros behind the last one up to whole tiles
    std::size_t row_stride;
    Panels<std::uint16_t> weights;
    int num_steps;
    float* sums;  // [rows][sums_stride]
    std::size_t sums_stride;
    const char* next;  // what is fetched meanwhile
};

// The registers: sums in 0 … 3, rows in 4 and 5, weights in 6 and 7.
constexpr int kTileOfRows = 4, kTileOfWeights = 6;
// A tile of weights has so many steps. In one, a panel has so many numbers: a line of memory.
constexpr int kTileSteps = tiles::kMostRows, kLineNumbers = kPanelWidth * Step<std::uint16_t>::kInputs;
static_assert(kLineNumbers * sizeof(std::uint16_t) == tiles::kRowBytes);

template <int kIndex>
struct TileIndex {
    static constexpr int value = kIndex;
};

template <int kCount, typename Work>
QUIRE_INLINE void for_tiles(Work work) {
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
        (work(TileIndex<kIndex>()), ...);
    }(std::make_integer_sequence<int, kCount>());
}

// One or two tiles of rows times up to four or two of weights.
template <int kRowTiles, int kPanels>
class TileProduct {
  public:
    // Fetches `lines` of what comes next for each product of tiles; returns where that ends.
    static const char* add(TileChunk chunk, int tile_rows, int lines) {
        const std::size_t rows_apart = tile_rows * chunk.row_stride, sums_apart = tile_rows * chunk.sums_stride;
        const std::size_t sums_stride = chunk.sums_stride * sizeof(float);
        const auto sums_of = [&](int sum) {
            return chunk.sums + sum / kPanels * sums_apart + sum % kPanels * kPanelWidth;
        };
        for_tiles<kRowTiles * kPanels>([&](auto sum) { tiles::load<sum.value>(sums_of(sum.value), sums_stride); });
        for (; chunk.num_steps >= kTileSteps; chunk.num_steps -= kTileSteps) {
            add_steps(chunk, rows_apart, lines);
            chunk.rows += kTileSteps;
            chunk.weights.first += kTileSteps * chunk.weights.step;
        }
        if (chunk.num_steps > 0) {
            // The last steps of a matrix, beside zeros: behind them lies what must not be read.
            alignas(tiles::kRowBytes) std::uint16_t filled[kTileSteps][kPanels * kLineNumbers] = {};
            for (int i = 0; i < chunk.num_steps; ++i) std::memcpy(filled[i], chunk.weights.at(i), sizeof filled[i]);
            chunk.weights = {.first = filled[0], .step = kPanels * kLineNumbers, .count = kPanels};
            add_steps(chunk, rows_apart, lines);
        }
        for_tiles<kRowTiles * kPanels>([&](auto sum) { tiles::store<sum.value>(sums_of(sum.value), sums_stride); });
        return chunk.next;
    }

  private:
    QUIRE_INLINE static void add_steps(TileChunk& chunk, std::size_t rows_apart, int lines) {
        for_tiles<kRowTiles>([&](auto tile) {
            tiles::load<kTileOfRows + tile.value>(chunk.rows + tile.value * rows_apart,
                                                  chunk.row_stride * sizeof(std::uint32_t));
        });
        for_tiles<kPanels>([&](auto panel) {
            constexpr int kWeights = kTileOfWeights + panel.value % 2;
            tiles::load<kWeights>(chunk.weights.first + panel.value * kLineNumbers,
                                  chunk.weights.step * sizeof(std::uint16_t));
            for_tiles<kRowTiles>([&](auto tile) {
                tiles::multiply<tile.value * kPanels + panel.value, kTileOfRows + tile.value, kWeights>();
                for (int line = 0; line < lines; ++line, chunk.next += tiles::kRowBytes) {
                    __builtin_prefetch(chunk.next, 0, 3);
                }
            });
        });
    }
};

template <int kRowTiles, int kPanels>
const char* add_tiles(const TileChunk& chunk, int tile_rows, int lines) {
    if constexpr (kPanels > 1) {
        if (chunk.weights.count < kPanels) return add_tiles<kRowTiles, kPanels - 1>(chunk, tile_rows, lines);
    }
    return TileProduct<kRowTiles, kPanels>::add(chunk, tile_rows, lines);
}

template <>
class BlockTiles<std::uint16_t> {
  public:
    explicit BlockTiles(int num_rows)
        : num_tiles_(tiles_of(num_rows)),
          tile_rows_(pieces_of(num_rows, num_tiles_)),
          configured_(configuration_for(tile_rows_)) {}

    static int rows_taken(int num_rows) { return tiles_of(num_rows) * pieces_of(num_rows, tiles_of(num_rows)); }

    // Adds the products of all rows of the block.
    void add(const TileChunk& block) const {
        const int lines = kTileSteps * static_cast<int>(block.weights.step) / kLineNumbers;
        const int lines_per_product = pieces_of(lines, num_tiles_ * block.weights.count);
        TileChunk chunk = block;
        for (int tile = 0; tile < num_tiles_; tile += 2) {
            const bool single = tile + 1 == num_tiles_;
            chunk.rows = block.rows + tile * tile_rows_ * block.row_stride;
            for (int panel = 0; panel < block.weights.count; panel += chunk.weights.count) {
                chunk.weights.first = block.weights.first + panel * kLineNumbers;
                chunk.weights.count = least(single ? kGroupPanels : 2, block.weights.count - panel);
                chunk.sums = block.sums + tile * tile_rows_ * block.sums_stride + panel * kPanelWidth;
                chunk.next = single ? add_tiles<1, kGroupPanels>(chunk, tile_rows_, lines_per_product)
                                    : add_tiles<2, 2>(chunk, tile_rows_, lines_per_product);
            }
        }
    }

  private:
    static int tiles_of(int num_rows) { return pieces_of(num_rows, tiles::kMostRows); }

    static tiles::Configuration configuration_for(int tile_rows) {
        tiles::Configuration configuration;
        for (int tile = 0; tile < tiles::kNumTiles; ++tile) {
            configuration.row_bytes[tile] = tiles::kRowBytes;
            configuration.rows[tile] = static_cast<std::uint8_t>(tile < kTileOfWeights ? tile_rows : kTileSteps);
        }
        return configuration;
    }

    const int num_tiles_, tile_rows_;
    const tiles::Configured configured_;
};

#endif  // QUIRE_HAS_TILES

}  // namespace quire::QUIRE_ISA
