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

// The sums of a row's numbers are kept for each kUnit inputs: the smallest group that codes share a scale in.
constexpr int kUnit = 16;

// The rows of a span, rounded.
class CodedRows {
  public:
    // The number of inputs of a span.
    static int num_inputs(int num_rows) { return kMostNumbers / num_rows / kChunkInputs * kChunkInputs; }

    void take(const Rows& input, int first_input, int num_inputs, int num_rows) {
        inputs_ = round_up(num_inputs, kRowGroup);
        for (int r = 0; r < num_rows; ++r) {
            const RoundedRow to = {.numbers = numbers_ + r * inputs_,
                                   .sums = sums_ + r * (inputs_ / kUnit),
                                   .scales = scales_ + r * (inputs_ / kRowGroup)};
            round_row(input.row(r) + first_input, num_inputs, to);
        }
    }
    // The sum of the numbers of each group, as floats, which minimums are multiplied by.
    void add_up(int group, int num_rows) {
        const std::size_t num_groups = num_rows * inputs_ / group;
        for (std::size_t g = 0; g < num_groups; ++g) {
            const std::int32_t sum = group == kUnit ? sums_[g] : sums_[2 * g] + sums_[2 * g + 1];
            totals_[group == kUnit][g] = scales_[g * group / kRowGroup] * static_cast<float>(sum);
        }
    }

    std::size_t inputs() const { return inputs_; }  // from one row to the next
    const std::int8_t* numbers_at(int row, int input) const { return numbers_ + row * inputs_ + input; }
    const std::int32_t* sums_at(int row, int input) const { return sums_ + (row * inputs_ + input) / kUnit; }
    const float* scales_at(int row, int input) const { return scales_ + (row * inputs_ + input) / kRowGroup; }
    const float* totals_at(int row, int input, int group) const {
        return totals_[group == kUnit] + (row * inputs_ + input) / group;
    }

  private:
    static constexpr int kMostNumbers = 4 * kSpanNumbers;

    alignas(64) std::int8_t numbers_[kMostNumbers];
    std::int32_t sums_[kMostNumbers / kUnit];
    float scales_[kMostNumbers / kRowGroup];
    float totals_[2][kMostNumbers / kUnit];  // of groups of 32, and of 16
    std::size_t inputs_ = 0;
};

// What to prefetch while a tile is computed: `pace` is in 1/256 bytes, for each step and panel, and so is the place
// that was reached. Spread like this, it never fills the queue for what is on its way, at which the core would wait.
struct CodedFetch {
    const std::byte* from;
    std::size_t reached, pace;
};

// The scales of a chunk, or its minimums, widened.
struct WideScales {
    const Floats* first;  // of the first panel of a tile
    int step;             // from one group to the next

    Floats at(int group, int panel) const { return first[group * step + panel]; }
};

// The same as they are in memory. Each read prefetches the same place of the chunk that comes next.
struct StoredScales {
    const std::byte* first;
    std::size_t step;
    std::ptrdiff_t ahead;
    bool nested;
    Floats outer[kGroupPanels];

    // From a panel of a group on.
    StoredScales(const CodedLayout& layout, const std::byte* from, int place, std::ptrdiff_t ahead)
        : ahead(ahead), nested(layout.coding.nested) {
        const std::size_t lanes = static_cast<std::size_t>(layout.panels) * kPanelWidth;
        first = from + place * kPanelWidth * (nested ? 1 : 2);
        step = lanes * (nested ? 1 : 2);
        if (!nested) return;
        for (int p = 0; p < layout.panels - place; ++p) outer[p] = half(from + 2 * (place + p) * kPanelWidth);
        first += 2 * lanes;
    }
    Floats at(int group, int panel) const {
        const std::byte* place = first + group * step + panel * kPanelWidth * (nested ? 1 : 2);
        return nested ? outer[panel] * load(fetched<std::int8_t>(place)) : half(place);
    }

  private:
    template <typename Number>
    const Number* fetched(const std::byte* place) const {
        __builtin_prefetch(place + ahead, 0, 3);
        return reinterpret_cast<const Number*>(place);
    }
    Floats half(const std::byte* place) const { return load_float16(fetched<std::uint16_t>(place)); }
};

// Some rows and panels of a chunk.
template <typename Scales>
struct CodedTile {
    const std::int8_t* rows;
    const std::int32_t* row_sums;
    const float* row_scales;
    std::size_t row_stride;  // in inputs
    const std::byte* codes;
    std::size_t unit;  // bytes from the units of 32 inputs to the next ones
    Scales scales;
    int num_units, middle;
    Floats (*sums)[kBlockPanels];
    CodedFetch fetch;
};

// The sums of a tile are in registers twice: as integers of a group, and as floats. kCodedRows: the rows of most tiles.
// kMostCodedRows: up to this many rows go through a widened chunk as one tile. Up to kMostPackedRows rows widen codes
// in registers, once for each tile.
#if defined(__AVX512F__)
constexpr int kCodedSums = 12, kCodedRows = 3, kMostCodedRows = 6, kMostPackedRows = 8;
#else
constexpr int kCodedSums = 2, kCodedRows = 1, kMostCodedRows = 2, kMostPackedRows = 1;
#endif
constexpr int kPackedPanels = least(kGroupPanels, kCodedSums / kCodedRows);

// kBits: of codes in memory; 8 in scratch memory. kGroup: the inputs that share a scale of the codes.
template <int kBits, int kRows, int kPanels, int kGroup, typename Scales>
void multiply_codes(const CodedTile<Scales>& tile) {
    constexpr bool kPacked = std::is_same_v<Scales, StoredScales>;
    constexpr int kGroups = kUnitInputs / kGroup, kSteps = kGroup / kStepInputs, kSums = kGroup / kUnit;
    const std::byte* codes = tile.codes;
    const std::int8_t* rows = tile.rows;
    std::size_t reached = tile.fetch.reached, fetched = reached >> 8;
    Floats totals[kRows][kPanels];
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) totals[r][p] = tile.sums[r][p];
    }
    for (int u = 0; u < tile.num_units; ++u, codes += tile.unit, rows += kUnitInputs) {
        QUIRE_UNROLLED for (int g = 0; g < kGroups; ++g) {
            Ints sums[kRows][kPanels];
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const std::int32_t* of_row = tile.row_sums + r * tile.row_stride / kUnit + u * 2 + g;
                const int start = kSums == 1 ? *of_row : of_row[0] + of_row[1];
                const Ints first = broadcast_int(CodeStep::kSigned ? 0 : -tile.middle * start);
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = first;
            }
            QUIRE_UNROLLED for (int i = 0; i < kSteps; ++i) {
                const int step = g * kSteps + i;
                CodeStep::Vector weights[kPanels];
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                    reached += tile.fetch.pace;
                    if (kPacked) __builtin_prefetch(tile.fetch.from + (reached >> 8), 0, 3);
                    const Ints bytes = step_of<kBits>(codes + p * kBits * kStepBytes, step);
                    weights[p] = CodeStep::codes(CodeStep::kSigned && kBits < 8 ? less(bytes, tile.middle) : bytes);
                }
                for (; !kPacked && fetched < reached >> 8; fetched += kLineBytes) {
                    __builtin_prefetch(tile.fetch.from + fetched, 0, 3);
                }
                QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                    const std::int8_t* numbers = rows + r * tile.row_stride + step * kStepInputs;
                    QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                        sums[r][p] = CodeStep::add(sums[r][p], weights[p], numbers);
                    }
                }
            }
            Floats scales[kPanels];
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) scales[p] = tile.scales.at(u * kGroups + g, p);
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const Floats row_scale = broadcast(tile.row_scales[r * tile.row_stride / kRowGroup + u]);
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
template <int kGroup, int kRows = kMostCodedRows, int kPanels = kGroupPanels>
void multiply_wide_tile(const CodedTile<WideScales>& tile, int num_rows, int num_panels) {
    if (num_rows < kRows) {
        if constexpr (kRows > 1) multiply_wide_tile<kGroup, kRows - 1, kPanels>(tile, num_rows, num_panels);
    } else if (num_panels < kPanels) {
        if constexpr (kPanels > 1) multiply_wide_tile<kGroup, kRows, kPanels - 1>(tile, num_rows, num_panels);
    } else if constexpr (kRows * kPanels <= kCodedSums) {
        multiply_codes<8, kRows, kPanels, kGroup>(tile);
    }
}

// Multiplies a tile of at most kCodedRows rows and of kPackedPanels panels, from a chunk as it is in memory.
template <int kBits, int kRows = kCodedRows>
void multiply_packed_tile(const CodedTile<StoredScales>& tile, int group, int num_rows) {
    if constexpr (kRows > 1) {
        if (num_rows < kRows) return multiply_packed_tile<kBits, kRows - 1>(tile, group, num_rows);
    }
    if (group == kUnit) return multiply_codes<kBits, kRows, kPackedPanels, kUnit>(tile);
    multiply_codes<kBits, kRows, kPackedPanels, kRowGroup>(tile);
}

// Writes units of codes of fewer than 8 bits as units of 8 bits.
template <int kBits>
void widen_units(const CodedPanels& panels, const std::byte* from, int num_units, std::byte* to) {
    const std::size_t unit_bytes = panels.layout.unit_bytes();
    from += panels.place * unit_bytes;
    for (int u = 0; u < num_units; ++u, from += panels.layout.panels * unit_bytes) {
        for (int p = 0; p < panels.count; ++p, to += kUnitSteps * kStepBytes) {
            QUIRE_UNROLLED for (int step = 0; step < kUnitSteps; ++step) {
                Ints bytes = step_of<kBits>(from + p * unit_bytes, step);
                if (CodeStep::kSigned) bytes = less(bytes, middle_of(panels.layout.coding));
                store_step(to + step * kStepBytes, bytes);
            }
        }
    }
}

// A chunk of some panels, as it is in memory.
struct SpanChunk {
    const CodedPanels& panels;
    int input, input_of_span, num_inputs;
    const std::byte* next;  // the chunk to prefetch

    const std::byte* stored() const { return panels.at(input); }
    std::size_t code_bytes() const { return panels.layout.code_bytes(num_inputs); }
    StoredScales scales(int first_panel) const { return scales_at(code_bytes(), first_panel); }
    StoredScales minimums(int first_panel) const {
        return scales_at(code_bytes() + panels.layout.scale_bytes(num_inputs), first_panel);
    }

  private:
    StoredScales scales_at(std::size_t offset, int first_panel) const {
        return {panels.layout, stored() + offset, first_panel, next - stored()};
    }
};

// Adds the minimums of kPackedPanels panels, times the totals of a row's groups.
inline void add_minimums(const float* totals, const StoredScales& minimums, int num_groups, Floats* sums) {
    Floats all[kPackedPanels];
    QUIRE_UNROLLED for (int p = 0; p < kPackedPanels; ++p) all[p] = sums[p];
    for (int g = 0; g < num_groups; ++g) {
        const Floats total = broadcast(totals[g]);
        QUIRE_UNROLLED for (int p = 0; p < kPackedPanels; ++p) all[p] = fma(total, minimums.at(g, p), all[p]);
    }
    QUIRE_UNROLLED for (int p = 0; p < kPackedPanels; ++p) sums[p] = all[p];
}

// A chunk of some panels, widened.
class WideChunk {
  public:
    void take(const SpanChunk& chunk) {
        const CodedPanels& panels = chunk.panels;
        const int num_groups = chunk.num_inputs / panels.layout.coding.group;
        take_codes(panels, chunk.stored(), chunk.num_inputs / kUnitInputs);
        widen(chunk.scales(panels.place), num_groups, panels.count, scales);
        if (panels.layout.coding.minimums) widen(chunk.minimums(panels.place), num_groups, panels.count, minimums);
    }

    const std::byte* codes;
    std::size_t unit;
    Floats scales[kChunkInputs / 16 * kGroupPanels], minimums[kChunkInputs / 16 * kGroupPanels];

  private:
    void take_codes(const CodedPanels& panels, const std::byte* chunk, int num_units) {
        codes = wide_;
        unit = static_cast<std::size_t>(panels.count) * kUnitSteps * kStepBytes;
        switch (panels.layout.coding.bits) {
            case 4:
                return widen_units<4>(panels, chunk, num_units, wide_);
            case 5:
                return widen_units<5>(panels, chunk, num_units, wide_);
            case 6:
                return widen_units<6>(panels, chunk, num_units, wide_);
            default:
                codes = chunk + panels.place * panels.layout.unit_bytes();
                unit = panels.layout.panels * panels.layout.unit_bytes();
        }
    }

    static void widen(const StoredScales& stored, int num_groups, int num_panels, Floats* to) {
        for (int g = 0; g < num_groups; ++g) {
            for (int p = 0; p < num_panels; ++p) *to++ = stored.at(g, p);
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
    // Of panels whose scales are those of `group` inputs.
    bool have_minimums(int group) const {
        bool found = false;
        for (int g = 0; g < num_groups; ++g) {
            const Coding& coding = groups[g].layout.coding;
            found |= coding.minimums && coding.group == group;
        }
        return found;
    }
};

template <typename Number>
class BlockProduct;

// sums[r][p] = the products of the first rows of `input` with the 16 outputs of each panel
template <>
class BlockProduct<Coded> {
  public:
    BlockProduct(const MatrixView& matrix, const BlockPanels<Coded>& panels, const Rows& input, int num_rows,
                 BlockSums& sums)
        : panels_(panels), num_rows_(num_rows), sums_(sums) {
        for (int r = 0; r < num_rows; ++r) {
            for (Floats& sum : sums[r]) sum = broadcast(0.0F);
        }
        const int span = CodedRows::num_inputs(num_rows);
        for (int start = 0; start < matrix.num_inputs; start += span) {
            const int end = least(matrix.num_inputs, start + span);
            rows_.take(input, start, end - start, num_rows);
            for (const int group : {kUnit, kRowGroup}) {
                if (panels.have_minimums(group)) rows_.add_up(group, num_rows);
            }
            add_span(start, end, end < matrix.num_inputs);
        }
    }

  private:
    void add_span(int start, int end, bool more) {
        int panel = 0;
        for (int g = 0; g < panels_.num_groups; ++g) {
            const CodedPanels& group = panels_.groups[g];
            for (int input = start; input < end; input += kChunkInputs) {
                // The next chunk: of this group, the next group, the next span or the next block.
                const std::byte* next = input + kChunkInputs < end   ? group.at(input + kChunkInputs)
                                        : g + 1 < panels_.num_groups ? panels_.groups[g + 1].at(start)
                                        : more                       ? panels_.groups[0].at(end)
                                                                     : panels_.next.at(0);
                const int num_inputs = round_up(least(kChunkInputs, end - input), kCodedGroup);
                add_chunk({group, input, input - start, num_inputs, next}, panel);
            }
            panel += group.count;
        }
    }

    void add_chunk(const SpanChunk& chunk, int panel) {
        const bool packed = num_rows_ <= kMostPackedRows && chunk.panels.count % kPackedPanels == 0;
        const int num_tiles = !packed && num_rows_ <= kMostCodedRows ? 1 : pieces_of(num_rows_, kCodedRows);
        const int most_panels = packed ? kPackedPanels : kCodedSums / pieces_of(num_rows_, num_tiles);
        const int count = chunk.panels.count, tile_panels = pieces_of(count, pieces_of(count, most_panels));
        if (!packed) wide_.take(chunk);
        // All tiles together fetch the codes of the next chunk.
        const std::size_t steps = chunk.num_inputs / kStepInputs;
        CodedFetch fetch = {chunk.next, 0, (chunk.code_bytes() << 8) / (num_tiles * count * steps)};
        for (int t = 0; t < num_tiles; ++t) {
            const int row = num_rows_ * t / num_tiles, end = num_rows_ * (t + 1) / num_tiles;
            for (int p = 0; p < count; p += tile_panels) {
                const LinearTile place = {row, end - row, p, least(tile_panels, count - p)};
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

    template <typename Scales>
    CodedTile<Scales> tile_of(const SpanChunk& chunk, int row, const Scales& scales, const CodedFetch& fetch) const {
        const Coding& coding = chunk.panels.layout.coding;
        return {.rows = rows_.numbers_at(row, chunk.input_of_span),
                .row_sums = rows_.sums_at(row, chunk.input_of_span),
                .row_scales = rows_.scales_at(row, chunk.input_of_span),
                .row_stride = rows_.inputs(),
                .codes = nullptr,
                .unit = 0,
                .scales = scales,
                .num_units = chunk.num_inputs / kUnitInputs,
                .middle = coding.bits == 8 ? CodeStep::kFlip : middle_of(coding),
                .sums = nullptr,
                .fetch = fetch};
    }

    void add_packed_tile(const SpanChunk& chunk, const LinearTile& place, Floats (*sums)[kBlockPanels],
                         const CodedFetch& fetch) const {
        const CodedLayout& layout = chunk.panels.layout;
        const int first = chunk.panels.place + place.first_panel, group = layout.coding.group;
        CodedTile tile = tile_of(chunk, place.first_row, chunk.scales(first), fetch);
        tile.codes = chunk.stored() + first * layout.unit_bytes();
        tile.unit = layout.panels * layout.unit_bytes();
        tile.sums = sums;
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
            add_minimums(rows_.totals_at(place.first_row + r, chunk.input_of_span, group), minimums,
                         chunk.num_inputs / group, sums[r]);
        }
    }

    void add_wide_tile(const SpanChunk& chunk, const LinearTile& place, Floats (*sums)[kBlockPanels],
                       const CodedFetch& fetch) const {
        const Coding& coding = chunk.panels.layout.coding;
        const int count = chunk.panels.count;
        CodedTile tile = tile_of(chunk, place.first_row, WideScales{wide_.scales + place.first_panel, count}, fetch);
        tile.codes = wide_.codes + static_cast<std::size_t>(place.first_panel) * kUnitSteps * kStepBytes;
        tile.unit = wide_.unit;
        tile.sums = sums;
        if (coding.group == kUnit) {
            multiply_wide_tile<kUnit>(tile, place.num_rows, place.num_panels);
        } else {
            multiply_wide_tile<kRowGroup>(tile, place.num_rows, place.num_panels);
        }
        if (!coding.minimums) return;
        multiply_tile<kMostTileRows, kGroupPanels>(
            Tile<float>{.rows = rows_.totals_at(place.first_row, chunk.input_of_span, coding.group),
                        .row_stride = rows_.inputs() / coding.group,
                        .weights = reinterpret_cast<const float*>(wide_.minimums + place.first_panel),
                        .weight_step = static_cast<std::size_t>(count) * kPanelWidth,
                        .num_steps = chunk.num_inputs / coding.group,
                        .sums = sums,
                        .fetch = {reinterpret_cast<const char*>(fetch.from), 0, 0}},
            place.num_rows, place.num_panels);
    }

    const BlockPanels<Coded>& panels_;
    const int num_rows_;
    BlockSums& sums_;
    CodedRows rows_;
    WideChunk wide_;
};

}  // namespace quire::QUIRE_ISA
