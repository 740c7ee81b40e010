// Products of rows with coded matrices (see coded.h).
//
// Rows are rounded to int8 too, 32 inputs at a time. The products of the inputs that share a scale are added as
// integers, exactly; then they become floats, in order:
//
//     sum = fma(integers, scale of the codes * scale of the row, sum)
//     sum = fma(scale of the row * its sum of integers, minimum, sum)      after each chunk, if there are minimums
//
// So all instruction sets with fma compute the same bits.
#pragma once

#include <type_traits>

#include "block_product.h"
#include "coded.h"
#include "round_rows.h"

namespace quire::QUIRE_ISA {

constexpr std::size_t kLineBytes = 64;

// A tag for matrices with codes, next to float and std::uint16_t.
struct Coded {};

// What to prefetch while a tile is computed: `pace` is in 1/256 bytes, for each step and panel, and so is the place
// that was reached. Spread like this, it seldom fills the queue for what is on its way: a full one drops what comes.
struct CodedFetch {
    const std::byte* from;
    std::size_t reached, pace;
};

// The scales of a chunk, or its minimums, widened.
struct WideScales {
    const Floats* first;  // of the first panel of a tile
    int groups, panels;   // of a unit, of a group

    Floats at(int unit, int group, int panel) const { return first[(unit * groups + group) * panels + panel]; }
};

// The same as they are in memory.
struct StoredScales {
    const std::byte* first;
    std::size_t unit, group;  // bytes from one to the next
    bool nested;
    Floats outer[kGroupPanels];

    // From the panel at `place` of a group on.
    StoredScales(const CodedLayout& layout, const std::byte* chunk, int place, bool minimums)
        : unit(layout.unit_bytes()), group(layout.group_bytes()), nested(layout.coding.nested) {
        const std::size_t before = layout.code_bytes() + (minimums ? layout.scale_bytes() : 0);
        first = chunk + layout.head_bytes() + before + place * kPanelWidth * (nested ? 1 : 2);
        if (!nested) return;
        const std::byte* from = chunk + (minimums ? layout.outer_bytes() : 0);
        for (int p = 0; p < layout.panels - place; ++p) outer[p] = half(from + 2 * (place + p) * kPanelWidth);
    }
    Floats at(int unit_index, int group_index, int panel) const {
        const std::byte* from = first + unit_index * unit + group_index * group;
        if (!nested) return half(from + 2 * panel * kPanelWidth);
        return outer[panel] * load(reinterpret_cast<const std::int8_t*>(from + panel * kPanelWidth));
    }

  private:
    static Floats half(const std::byte* from) { return load_float16(reinterpret_cast<const std::uint16_t*>(from)); }
};

// The sums of a tile are in registers twice: as integers of a group, and as floats. kCodedRows: the most rows of a
// tile. Blocks of up to kMostPackedRows rows widen codes in registers, once for each tile; their tiles have fewer rows
// and more panels.
#if defined(__AVX512F__)
constexpr int kCodedSums = 12, kCodedRows = 6, kPackedRows = 3, kMostPackedRows = 8;
#else
constexpr int kCodedSums = 2, kCodedRows = 2, kPackedRows = 1, kMostPackedRows = 1;
#endif

// The most panels of a tile. Of three panels of a group the last one would be alone.
constexpr int coded_panels(int num_rows) {
    const int most = least(kGroupPanels, kCodedSums / num_rows);
    return most == 3 ? 2 : most;
}

// The lines of codes from a panel on, in memory or in scratch memory; in bytes from one to the next.
struct CodeLines {
    const std::byte* first;
    std::size_t line, unit;
};

// Some rows and panels of a chunk.
template <typename Scales>
struct CodedTile {
    RoundedChunk rows;
    CodeLines codes;
    Scales scales;
    int num_units, middle;
    Floats (*sums)[kBlockPanels];
    CodedFetch fetch;
};

// kBits: of codes in memory; 8 in scratch memory. kGroup: the inputs that share a scale of the codes.
template <int kBits, int kRows, int kPanels, int kGroup, typename Scales>
void multiply_codes(const CodedTile<Scales>& tile) {
    constexpr bool kPacked = std::is_same_v<Scales, StoredScales>;
    constexpr int kGroups = kUnitInputs / kGroup, kSums = kGroup / kUnit;
    constexpr int kSteps = kLineSteps<kBits>, kLines = kGroup / kStepInputs / kSteps;
    const std::byte* codes = tile.codes.first;
    const std::size_t line_bytes = tile.codes.line;
    const std::int8_t* rows = tile.rows.numbers;
    std::size_t reached = tile.fetch.reached, fetched = reached >> 8;
    Floats totals[kRows][kPanels];
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) totals[r][p] = tile.sums[r][p];
    }
    for (int u = 0; u < tile.num_units; ++u, codes += tile.codes.unit, rows += kUnitInputs) {
        const std::byte *at = codes, *high = codes + 4 * line_bytes;
        QUIRE_UNROLLED for (int g = 0; g < kGroups; ++g) {
            Ints sums[kRows][kPanels];
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const std::int32_t* of_row = tile.rows.sums + r * RoundedChunk::kSums + u * 2 + g;
                const int start = kSums == 1 ? *of_row : of_row[0] + of_row[1];
                const Ints first = broadcast_int(CodeStep::kSigned ? 0 : -tile.middle * start);
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = first;
            }
            const auto add_line = [&](int line) {
                CodeStep::Vector weights[kSteps][kPanels];
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                    const std::byte* panel = at + p * kStepBytes;
                    Ints steps[kSteps];
                    steps_of<kBits>(panel, high + p * kStepBytes, line_bytes, line, steps);
                    QUIRE_UNROLLED for (int s = 0; s < kSteps; ++s) {
                        const bool from_zero = CodeStep::kSigned && kBits < 8;
                        weights[s][p] = CodeStep::codes(from_zero ? less(steps[s], tile.middle) : steps[s]);
                    }
                }
                at += line_bytes;
                reached += kPanels * kSteps * tile.fetch.pace;
                for (; fetched < reached >> 8; fetched += kLineBytes) {
                    __builtin_prefetch(tile.fetch.from + fetched, 0, 3);
                }
                QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                    const std::int8_t* numbers = rows + r * kChunkInputs + line * kSteps * kStepInputs;
                    QUIRE_UNROLLED for (int s = 0; s < kSteps; ++s) {
                        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                            sums[r][p] = CodeStep::add(sums[r][p], weights[s][p], numbers + s * kStepInputs);
                        }
                    }
                }
            };
            if constexpr (kPacked) {
                QUIRE_ROLLED for (int line = 0; line < kLines; ++line) add_line(g * kLines + line);
            } else {
                QUIRE_UNROLLED for (int line = 0; line < kLines; ++line) add_line(g * kLines + line);
            }
            Floats scales[kPanels];
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) scales[p] = tile.scales.at(u, g, p);
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const Floats row_scale = broadcast(tile.rows.scales[r * RoundedChunk::kScales + u]);
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                    totals[r][p] = fma(to_floats(sums[r][p]), scales[p] * row_scale, totals[r][p]);
                }
            }
        }
    }
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) tile.sums[r][p] = totals[r][p];
    }
}

// Multiplies a tile of at most kRows rows and kPanels panels.
template <int kGroup, int kRows = kCodedRows, int kPanels = kGroupPanels>
void multiply_wide_tile(const CodedTile<WideScales>& tile, int num_rows, int num_panels) {
    if (num_rows < kRows) {
        if constexpr (kRows > 1) multiply_wide_tile<kGroup, kRows - 1, kPanels>(tile, num_rows, num_panels);
    } else if (num_panels < kPanels) {
        if constexpr (kPanels > 1) multiply_wide_tile<kGroup, kRows, kPanels - 1>(tile, num_rows, num_panels);
    } else if constexpr (kRows * kPanels <= kCodedSums) {
        multiply_codes<8, kRows, kPanels, kGroup>(tile);
    }
}

// Multiplies a tile of at most kPackedRows rows and of all panels that it may have, from a chunk as it is in memory.
template <int kBits, int kRows = kPackedRows>
void multiply_packed_tile(const CodedTile<StoredScales>& tile, int group, int num_rows) {
    if constexpr (kRows > 1) {
        if (num_rows < kRows) return multiply_packed_tile<kBits, kRows - 1>(tile, group, num_rows);
    }
    if (group == kUnit) return multiply_codes<kBits, kRows, coded_panels(kRows), kUnit>(tile);
    multiply_codes<kBits, kRows, coded_panels(kRows), kRowGroup>(tile);
}

// Writes the units of some panels, of codes of fewer than 8 bits, as units of 8 bits.
template <int kBits>
void widen_units(const CodedPanels& panels, const std::byte* from, int num_units, std::byte* to) {
    const CodedLayout& layout = panels.layout;
    const std::size_t line_bytes = layout.line_bytes();
    constexpr int kSteps = kLineSteps<kBits>;
    for (int u = 0; u < num_units; ++u, from += layout.unit_bytes()) {
        for (int line = 0; line < kUnitSteps / kSteps; ++line) {
            for (int p = 0; p < panels.count; ++p) {
                Ints steps[kSteps];
                const std::byte* panel = from + p * kStepBytes;
                steps_of<kBits>(panel + line * line_bytes, panel + 4 * line_bytes, line_bytes, line, steps);
                QUIRE_UNROLLED for (int s = 0; s < kSteps; ++s) {
                    store_step(to + (s * panels.count + p) * kStepBytes,
                               CodeStep::kSigned ? less(steps[s], middle_of(layout.coding)) : steps[s]);
                }
            }
            to += kSteps * panels.count * kStepBytes;
        }
    }
}

// A chunk of some panels, as it is in memory.
struct SpanChunk {
    const CodedPanels& panels;
    int input, num_inputs;
    const std::byte* next;  // the chunk to prefetch

    const std::byte* stored() const { return panels.at(input); }
    std::size_t bytes() const { return panels.layout.chunk_bytes(num_inputs); }
    CodeLines codes(int first_panel) const {
        const CodedLayout& layout = panels.layout;
        return {stored() + layout.head_bytes() + first_panel * kStepBytes, layout.line_bytes(), layout.unit_bytes()};
    }
    StoredScales scales(int first_panel) const { return {panels.layout, stored(), first_panel, false}; }
    StoredScales minimums(int first_panel) const { return {panels.layout, stored(), first_panel, true}; }
};

// Adds the minimums of kPanels panels, times the totals of a row's groups.
template <int kPanels = kGroupPanels>
void add_minimums(const float* totals, const StoredScales& minimums, const SpanChunk& chunk, int num_panels,
                  Floats* sums) {
    if constexpr (kPanels > 1) {
        if (num_panels < kPanels) return add_minimums<kPanels / 2>(totals, minimums, chunk, num_panels, sums);
    }
    Floats all[kPanels];
    QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) all[p] = sums[p];
    for (int u = 0; u < chunk.num_inputs / kUnitInputs; ++u) {
        for (int g = 0; g < chunk.panels.layout.groups(); ++g) {
            const Floats total = broadcast(*totals++);
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) all[p] = fma(total, minimums.at(u, g, p), all[p]);
        }
    }
    QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[p] = all[p];
}

// A chunk of some panels, widened.
class WideChunk {
  public:
    void take(const SpanChunk& chunk) {
        const CodedPanels& panels = chunk.panels;
        const int num_units = chunk.num_inputs / kUnitInputs;
        codes = chunk.codes(panels.place);
        if (panels.layout.coding.bits < 8) widen_codes(panels, num_units);
        widen(chunk.scales(panels.place), panels, num_units, scales);
        if (panels.layout.coding.minimums) widen(chunk.minimums(panels.place), panels, num_units, minimums);
    }

    CodeLines codes;
    Floats scales[kChunkInputs / 16 * kGroupPanels], minimums[kChunkInputs / 16 * kGroupPanels];

  private:
    void widen_codes(const CodedPanels& panels, int num_units) {
        const std::byte* from = codes.first;
        const std::size_t line = panels.count * static_cast<std::size_t>(kStepBytes);
        codes = {wide_, line, kUnitSteps * line};
        switch (panels.layout.coding.bits) {
            case 4:
                return widen_units<4>(panels, from, num_units, wide_);
            case 5:
                return widen_units<5>(panels, from, num_units, wide_);
            default:
                return widen_units<6>(panels, from, num_units, wide_);
        }
    }

    static void widen(const StoredScales& stored, const CodedPanels& panels, int num_units, Floats* to) {
        for (int u = 0; u < num_units; ++u) {
            for (int g = 0; g < panels.layout.groups(); ++g) {
                for (int p = 0; p < panels.count; ++p) *to++ = stored.at(u, g, p);
            }
        }
    }

    alignas(64) std::byte wide_[kChunkInputs * kGroupPanels * kPanelWidth];
};

template <>
struct BlockPanels<Coded> {
    CodedPanels groups[kBlockGroups], next;
    int num_groups = 0;

    BlockPanels(const MatrixView& matrix, int next_panel) : next(coded_panels_from(matrix, next_panel, 1)) {}

    void add(const MatrixView& matrix, int panel, int count) {
        for (const int end = panel + count; panel < end && num_groups < kBlockGroups;
             panel += groups[num_groups++].count) {
            groups[num_groups] = coded_panels_from(matrix, panel, end - panel);
        }
    }
};

template <typename Number>
class BlockProduct;

// sums[r][p] = the products of the first rows of `input` with the 16 outputs of each panel
template <>
class BlockProduct<Coded> {
  public:
    BlockProduct(const MatrixView& matrix, const BlockPanels<Coded>& panels, const LinearInput& input, int first_row,
                 int num_rows, BlockSums& sums)
        : rounded_(input.rounded), first_row_(first_row), num_rows_(num_rows), sums_(sums) {
        for (int r = 0; r < num_rows; ++r) {
            for (Floats& sum : sums[r]) sum = broadcast(0.0F);
        }
        int panel = 0;
        for (int g = 0; g < panels.num_groups; panel += panels.groups[g++].count) {
            const CodedPanels& group = panels.groups[g];
            for (int from = 0; from < matrix.num_inputs; from += kChunkInputs) {
                // The next chunk: of this group, the next group or the next block.
                const std::byte* next = from + kChunkInputs < matrix.num_inputs ? group.at(from + kChunkInputs)
                                        : g + 1 < panels.num_groups             ? panels.groups[g + 1].at(0)
                                                                                : panels.next.at(0);
                const int num_inputs = round_up(least(kChunkInputs, matrix.num_inputs - from), kCodedGroup);
                add_chunk({group, from, num_inputs, next}, panel);
            }
        }
    }

  private:
    void add_chunk(const SpanChunk& chunk, int panel) {
        const int count = chunk.panels.count;
        const bool packed = num_rows_ <= kMostPackedRows && count % coded_panels(1) == 0;
        const int num_tiles = pieces_of(num_rows_, packed ? kPackedRows : kCodedRows);
        if (!packed) wide_.take(chunk);
        // All tiles together fetch the next chunk.
        const std::size_t steps = chunk.num_inputs / kStepInputs;
        CodedFetch fetch = {chunk.next, 0, (chunk.bytes() << 8) / (num_tiles * count * steps)};
        for (int t = 0; t < num_tiles; ++t) {
            const int row = num_rows_ * t / num_tiles, num_rows = num_rows_ * (t + 1) / num_tiles - row;
            for (int p = 0, next; p < count; p = next) {
                next = least(count, p + coded_panels(num_rows));
                const LinearTile place = {row, num_rows, p, next - p};
                auto* sums = reinterpret_cast<Floats(*)[kBlockPanels]>(&sums_[row][panel + p]);
                if (packed) {
                    add_packed_tile(chunk, place, sums, fetch);
                } else {
                    add_wide_tile(chunk, place, sums, fetch);
                }
                fetch.reached += fetch.pace * steps * place.num_panels;
            }
        }
    }

    void add_packed_tile(const SpanChunk& chunk, const LinearTile& place, Floats (*sums)[kBlockPanels],
                         const CodedFetch& fetch) const {
        const CodedLayout& layout = chunk.panels.layout;
        const int first = chunk.panels.place + place.first_panel, group = layout.coding.group;
        const CodedTile tile = tile_of(chunk, place.first_row, chunk.codes(first), chunk.scales(first), sums, fetch);
        switch (layout.coding.bits) {
            case 4:
                multiply_packed_tile<4>(tile, group, place.num_rows);
                break;
            case 5:
                multiply_packed_tile<5>(tile, group, place.num_rows);
                break;
            case 6:
                multiply_packed_tile<6>(tile, group, place.num_rows);
                break;
            default:
                multiply_packed_tile<8>(tile, group, place.num_rows);
        }
        if (!layout.coding.minimums) return;
        const StoredScales minimums = chunk.minimums(first);
        for (int r = 0; r < place.num_rows; ++r) {
            add_minimums(totals_of(tile.rows, group, r), minimums, chunk, place.num_panels, sums[r]);
        }
    }

    void add_wide_tile(const SpanChunk& chunk, const LinearTile& place, Floats (*sums)[kBlockPanels],
                       const CodedFetch& fetch) const {
        const CodedLayout& layout = chunk.panels.layout;
        const int count = chunk.panels.count, groups = layout.groups();
        CodeLines codes = wide_.codes;
        codes.first += place.first_panel * kStepBytes;
        const WideScales scales = {wide_.scales + place.first_panel, groups, count};
        const CodedTile tile = tile_of(chunk, place.first_row, codes, scales, sums, fetch);
        if (layout.coding.group == kUnit) {
            multiply_wide_tile<kUnit>(tile, place.num_rows, place.num_panels);
        } else {
            multiply_wide_tile<kRowGroup>(tile, place.num_rows, place.num_panels);
        }
        if (!layout.coding.minimums) return;
        multiply_tile<kMostTileRows, kGroupPanels>(
            Tile<float>{.rows = totals_of(tile.rows, layout.coding.group, 0),
                        .row_stride = static_cast<std::size_t>(kChunkInputs / layout.coding.group),
                        .weights = reinterpret_cast<const float*>(wide_.minimums + place.first_panel),
                        .weight_step = static_cast<std::size_t>(count) * kPanelWidth,
                        .num_steps = chunk.num_inputs / layout.coding.group,
                        .sums = sums,
                        .fetch = {reinterpret_cast<const char*>(fetch.from), 0, 0}},
            place.num_rows, place.num_panels);
    }

    static const float* totals_of(const RoundedChunk& rows, int group, int row) {
        return group == kUnit ? rows.unit_totals + row * RoundedChunk::kSums
                              : rows.totals + row * RoundedChunk::kScales;
    }

    template <typename Scales>
    CodedTile<Scales> tile_of(const SpanChunk& chunk, int row, const CodeLines& codes, const Scales& scales,
                              Floats (*sums)[kBlockPanels], const CodedFetch& fetch) const {
        const Coding& coding = chunk.panels.layout.coding;
        return {.rows = RoundedChunk(rounded_, chunk.input, first_row_ + row),
                .codes = codes,
                .scales = scales,
                .num_units = chunk.num_inputs / kUnitInputs,
                .middle = coding.bits == 8 ? CodeStep::kFlip : middle_of(coding),
                .sums = sums,
                .fetch = fetch};
    }

    const RoundedRows rounded_;
    const int first_row_, num_rows_;
    BlockSums& sums_;
    WideChunk wide_;
};

}  // namespace quire::QUIRE_ISA
