// Products of bfloat16 by a matrix unit: the rows of a block go through a chunk in tiles.
//
//     tile of sums       rows x 16 outputs      One instruction multiplies 32 inputs of up to 16 rows with the
//     tile of rows       rows x 16 pairs        weights of 16 outputs. A panel has the layout of a tile of weights:
//     tile of weights    16 pairs x 16 outputs  each row is a pair of inputs of 16 outputs.
//
//     up to 16 rows      1 x 4 tiles of sums: the rows are loaded once for four panels
//     more               2 x 2 tiles of sums: two loads of rows and two of weights for four products
//
// In a tile, the first inputs of all pairs are added up in order, then the second ones, and both together are
// added to the sum of the row. AVX-512 adds in another order, so tiles are used for every number of rows.
// Tiles begin at multiples of 32 inputs, wherever chunks begin.
//
// Rows are spread over tiles of one size, so that a block needs one configuration: 17 rows are two tiles of 9.
// The last row of the second tile is then unused: it affects only its own sum, which is never read.
#pragma once

#include <cstring>
#include <utility>

#include "panels.h"
#include "tiles.h"

namespace quire::QUIRE_ISA {

// The tile registers of a block of rows; empty for most types of numbers.
template <typename Number>
class BlockTiles {
  public:
    explicit BlockTiles(int) {}
};

#if QUIRE_HAS_TILES

// The rows of a block and some panels, in a chunk.
struct TileChunk {
    const std::uint32_t* rows;  // pairs, filled up to whole tiles with zeros
    std::size_t row_stride;
    Panels<std::uint16_t> weights;
    int num_steps;
    float* sums;  // [rows][sums_stride]
    std::size_t sums_stride;
    const char* next;  // prefetched meanwhile
};

// The registers: sums in 0 … 3, rows in 4 and 5, weights in 6 and 7.
constexpr int kTileOfRows = 4, kTileOfWeights = 6;
// A tile of weights has kTileSteps steps. In each, a panel has kLineNumbers numbers: one cache line.
constexpr int kTileSteps = tiles::kMostRows, kLineNumbers = kPanelWidth * Step<std::uint16_t>::kInputs;
static_assert(kLineNumbers * sizeof(std::uint16_t) == tiles::kRowBytes);

// One or two tiles of rows times up to four or two of weights.
template <int kRowTiles, int kPanels>
class TileProduct {
  public:
    // Prefetches `lines` cache lines for each product of tiles; returns where the next call continues.
    static const char* add(const TileChunk& chunk, int tile_rows, int lines) {
        constexpr auto kAllPanels = std::make_integer_sequence<int, kPanels>();
        constexpr auto kAllSums = std::make_integer_sequence<int, kRowTiles * kPanels>();
        const std::size_t row_stride = chunk.row_stride, rows_apart = tile_rows * row_stride, step = chunk.weights.step;
        const std::uint32_t* rows = chunk.rows;
        const std::uint16_t* weights = chunk.weights.first;
        const char* next = chunk.next;
        load_sums(kAllSums, chunk, tile_rows);
        int left = chunk.num_steps;
        for (; left >= kTileSteps; left -= kTileSteps, rows += kTileSteps, weights += kTileSteps * step) {
            load_rows(rows, row_stride, rows_apart);
            next = add_panels(kAllPanels, weights, step, next, lines);
        }
        if (left > 0) {
            // The last steps of a matrix, filled up with zeros: the memory after them must not be read.
            alignas(tiles::kRowBytes) std::uint16_t filled[kTileSteps][kPanels * kLineNumbers] = {};
            for (int i = 0; i < left; ++i) std::memcpy(filled[i], weights + i * step, sizeof filled[i]);
            load_rows(rows, row_stride, rows_apart);
            next = add_panels(kAllPanels, filled[0], kPanels * kLineNumbers, next, lines);
        }
        store_sums(kAllSums, chunk, tile_rows);
        return next;
    }

  private:
    template <int... kSum>
    QUIRE_INLINE static void load_sums(std::integer_sequence<int, kSum...>, const TileChunk& chunk, int tile_rows) {
        (tiles::load<kSum>(sums_at<kSum>(chunk, tile_rows), chunk.sums_stride * sizeof(float)), ...);
    }

    template <int... kSum>
    QUIRE_INLINE static void store_sums(std::integer_sequence<int, kSum...>, const TileChunk& chunk, int tile_rows) {
        (tiles::store<kSum>(sums_at<kSum>(chunk, tile_rows), chunk.sums_stride * sizeof(float)), ...);
    }

    template <int kSum>
    QUIRE_INLINE static float* sums_at(const TileChunk& chunk, int tile_rows) {
        return chunk.sums + kSum / kPanels * tile_rows * chunk.sums_stride + kSum % kPanels * kPanelWidth;
    }

    QUIRE_INLINE static void load_rows(const std::uint32_t* rows, std::size_t stride, std::size_t rows_apart) {
        tiles::load<kTileOfRows>(rows, stride * sizeof *rows);
        if constexpr (kRowTiles == 2) tiles::load<kTileOfRows + 1>(rows + rows_apart, stride * sizeof *rows);
    }

    template <int... kPanel>
    QUIRE_INLINE static const char* add_panels(std::integer_sequence<int, kPanel...>, const std::uint16_t* weights,
                                               std::size_t step, const char* next, int lines) {
        ((next = add_panel<kPanel>(weights + kPanel * kLineNumbers, step, next, lines)), ...);
        return next;
    }

    // Multiplies a tile of weights by the tiles of rows.
    template <int kPanel>
    QUIRE_INLINE static const char* add_panel(const std::uint16_t* weights, std::size_t step, const char* next,
                                              int lines) {
        constexpr int kWeights = kTileOfWeights + kPanel % 2;
        tiles::load<kWeights>(weights, step * sizeof *weights);
        tiles::multiply<kPanel, kTileOfRows, kWeights>();
        next = fetch(next, lines);
        if constexpr (kRowTiles == 2) {
            tiles::multiply<kPanels + kPanel, kTileOfRows + 1, kWeights>();
            next = fetch(next, lines);
        }
        return next;
    }

    QUIRE_INLINE static const char* fetch(const char* next, int lines) {
        for (const char* end = next + static_cast<std::ptrdiff_t>(lines) * tiles::kRowBytes; next != end;
             next += tiles::kRowBytes) {
            __builtin_prefetch(next, 0, 3);
        }
        return next;
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
