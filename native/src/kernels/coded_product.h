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

// What to prefetch while a tile is computed: `per_step` is in 1/256 bytes, and so is the place that was reached.
struct CodedFetch {
    const char* from;
    std::size_t reached, per_step;
};

// Some rows and panels of a chunk, whose codes have 8 bits.
struct CodedTile {
    const std::int8_t* rows;
    const std::int32_t* row_sums;
    const float* row_scales;
    std::size_t row_stride;  // in inputs
    const std::int8_t* codes;
    std::size_t step;      // bytes from one step to the next
    const Floats* scales;  // [groups][scale_step]
    int scale_step;
    int num_groups, middle;
    Floats (*sums)[kBlockPanels];
    CodedFetch fetch;
};

// The sums of a tile are in registers twice: as integers of a group, and as floats.
#if defined(__AVX512F__)
constexpr int kCodedSums = 12, kCodedRows = 3, kMostCodedRows = 6;
#else
constexpr int kCodedSums = 2, kCodedRows = 1, kMostCodedRows = 2;
#endif

// kGroup: the inputs that share a scale of the codes.
template <int kRows, int kPanels, int kGroup>
void multiply_codes(const CodedTile& tile) {
    constexpr int kUnits = kGroup / kUnit;
    const std::int8_t* codes = tile.codes;
    const std::int8_t* rows = tile.rows;
    const Floats* scales = tile.scales;
    std::size_t reached = tile.fetch.reached, fetched = reached >> 8;
    Floats totals[kRows][kPanels];
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) totals[r][p] = tile.sums[r][p];
    }
    for (int g = 0; g < tile.num_groups; ++g, scales += tile.scale_step, rows += kGroup) {
        Ints sums[kRows][kPanels];
        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
            const std::int32_t* unit = tile.row_sums + r * tile.row_stride / kUnit + g * kUnits;
            const Ints start = broadcast_int(-tile.middle * (kUnits == 1 ? *unit : unit[0] + unit[1]));
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = start;
        }
        QUIRE_UNROLLED for (int i = 0; i < kGroup; i += kStepInputs, codes += tile.step) {
            CodeStep::Vector weights[kPanels];
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) weights[p] = CodeStep::codes(codes + p * kStepBytes);
            for (reached += tile.fetch.per_step; fetched < reached >> 8; fetched += kLineBytes) {
                __builtin_prefetch(tile.fetch.from + fetched, 0, 3);
            }
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const std::int8_t* numbers = rows + r * tile.row_stride + i;
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                    sums[r][p] = CodeStep::add(sums[r][p], weights[p], numbers);
                }
            }
        }
        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
            const int group = g * kGroup / kRowGroup;
            const Floats row_scale = broadcast(tile.row_scales[r * tile.row_stride / kRowGroup + group]);
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                totals[r][p] = fma(to_floats(sums[r][p]), scales[p] * row_scale, totals[r][p]);
            }
        }
    }
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) tile.sums[r][p] = totals[r][p];
    }
}

// Multiplies a tile of at most kRows rows and kPanels panels.
template <int kGroup, int kRows = kMostCodedRows, int kPanels = kGroupPanels>
void multiply_coded_tile(const CodedTile& tile, int num_rows, int num_panels) {
    if (num_rows < kRows) {
        if constexpr (kRows > 1) multiply_coded_tile<kGroup, kRows - 1, kPanels>(tile, num_rows, num_panels);
    } else if (num_panels < kPanels) {
        if constexpr (kPanels > 1) multiply_coded_tile<kGroup, kRows, kPanels - 1>(tile, num_rows, num_panels);
    } else if constexpr (kRows * kPanels <= kCodedSums) {
        multiply_codes<kRows, kPanels, kGroup>(tile);
    }
}

// A chunk of some panels in the form that tiles need.
class WideChunk {
  public:
    void take(const CodedPanels& panels, int input, int num_inputs) {
        const CodedLayout& layout = panels.layout;
        const std::byte* chunk = panels.at(input);
        const std::byte* scales = chunk + layout.code_bytes(num_inputs);
        num_groups = num_inputs / layout.coding.group;
        if (layout.coding.bits == 8) {
            codes = reinterpret_cast<const std::int8_t*>(chunk) + panels.place * kStepBytes;
            step = layout.panels * kStepBytes;
        } else {
            codes = wide_;
            step = panels.count * kStepBytes;
            const int middle = CodeStep::kFlip == 0 ? middle_of_four_bits(layout.coding) : 0;
            for (int pair = 0; pair < num_inputs / (2 * kStepInputs); ++pair) {
                for (int p = 0; p < panels.count; ++p) {
                    widen_codes(chunk + (pair * layout.panels + panels.place + p) * kStepBytes, middle,
                                wide_ + 2 * pair * step + p * kStepBytes, step);
                }
            }
        }
        widen_scales(panels, scales, this->scales);
        if (layout.coding.minimums) widen_scales(panels, scales + layout.scale_bytes(num_inputs), minimums);
    }

    const std::int8_t* codes;
    std::size_t step;
    int num_groups;
    Floats scales[kChunkInputs / 16 * kGroupPanels], minimums[kChunkInputs / 16 * kGroupPanels];

  private:
    void widen_scales(const CodedPanels& panels, const std::byte* from, Floats* to) const {
        const int lanes = panels.layout.panels * kPanelWidth;
        if (!panels.layout.coding.nested) {
            const auto* halves = reinterpret_cast<const std::uint16_t*>(from) + panels.place * kPanelWidth;
            for (int g = 0; g < num_groups; ++g, halves += lanes) {
                for (int p = 0; p < panels.count; ++p) *to++ = load_float16(halves + p * kPanelWidth);
            }
            return;
        }
        const auto* halves = reinterpret_cast<const std::uint16_t*>(from) + panels.place * kPanelWidth;
        const auto* nested = reinterpret_cast<const std::int8_t*>(from) + 2 * lanes + panels.place * kPanelWidth;
        Floats outer[kGroupPanels];
        for (int p = 0; p < panels.count; ++p) outer[p] = load_float16(halves + p * kPanelWidth);
        for (int g = 0; g < num_groups; ++g, nested += lanes) {
            for (int p = 0; p < panels.count; ++p) *to++ = outer[p] * load(nested + p * kPanelWidth);
        }
    }

    alignas(64) std::int8_t wide_[kChunkInputs * kGroupPanels * kPanelWidth];
};

template <>
struct BlockPanels<Coded> {
    CodedPanels groups[kBlockGroups];
    int num_groups = 0;

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
        : panels_(panels),
          num_rows_(num_rows),
          num_tiles_(num_rows <= kMostCodedRows ? 1 : pieces_of(num_rows, kCodedRows)),
          sums_(sums) {
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
                // The next chunk: of this group, the next group or the next span. Without one, prefetch this one again.
                const std::byte* next = group.at(input);
                if (input + kChunkInputs < end) {
                    next = group.at(input + kChunkInputs);
                } else if (g + 1 < panels_.num_groups) {
                    next = panels_.groups[g + 1].at(start);
                } else if (more) {
                    next = panels_.groups[0].at(end);
                }
                add_chunk(group, panel, input, input - start, round_up(least(kChunkInputs, end - input), kCodedGroup),
                          reinterpret_cast<const char*>(next));
            }
            panel += group.count;
        }
    }

    void add_chunk(const CodedPanels& panels, int panel, int input, int input_of_span, int num_inputs,
                   const char* next) {
        chunk_.take(panels, input, num_inputs);
        const int most_panels = kCodedSums / pieces_of(num_rows_, num_tiles_);
        const int tile_panels = pieces_of(panels.count, pieces_of(panels.count, most_panels));
        const int steps = num_inputs / kStepInputs, num_pieces = num_tiles_ * pieces_of(panels.count, tile_panels);
        CodedFetch fetch = {next, 0, (panels.layout.chunk_bytes(num_inputs) << 8) / (num_pieces * steps)};
        for (int t = 0; t < num_tiles_; ++t) {
            const int row = num_rows_ * t / num_tiles_, end = num_rows_ * (t + 1) / num_tiles_;
            for (int p = 0; p < panels.count; p += tile_panels, fetch.reached += fetch.per_step * steps) {
                const int num_panels = least(tile_panels, panels.count - p);
                add_tile(panels, {row, end - row, p, num_panels}, input_of_span, &sums_[row][panel + p], fetch);
            }
        }
    }

    void add_tile(const CodedPanels& panels, const LinearTile& place, int input_of_span, Floats* first_sum,
                  const CodedFetch& fetch) {
        const Coding& coding = panels.layout.coding;
        auto* sums = reinterpret_cast<Floats(*)[kBlockPanels]>(first_sum);
        const CodedTile tile = {.rows = rows_.numbers_at(place.first_row, input_of_span),
                                .row_sums = rows_.sums_at(place.first_row, input_of_span),
                                .row_scales = rows_.scales_at(place.first_row, input_of_span),
                                .row_stride = rows_.inputs(),
                                .codes = chunk_.codes + place.first_panel * kStepBytes,
                                .step = chunk_.step,
                                .scales = chunk_.scales + place.first_panel,
                                .scale_step = panels.count,
                                .num_groups = chunk_.num_groups,
                                .middle = CodeStep::middle(coding),
                                .sums = sums,
                                .fetch = fetch};
        if (coding.group == kUnit) {
            multiply_coded_tile<kUnit>(tile, place.num_rows, place.num_panels);
        } else {
            multiply_coded_tile<kRowGroup>(tile, place.num_rows, place.num_panels);
        }
        if (!coding.minimums) return;
        multiply_tile<kMostTileRows, kGroupPanels>(
            Tile<float>{.rows = rows_.totals_at(place.first_row, input_of_span, coding.group),
                        .row_stride = rows_.inputs() / coding.group,
                        .weights = reinterpret_cast<const float*>(chunk_.minimums + place.first_panel),
                        .weight_step = static_cast<std::size_t>(panels.count) * kPanelWidth,
                        .num_steps = chunk_.num_groups,
                        .sums = sums,
                        .fetch = {fetch.from, 0, 0}},
            place.num_rows, place.num_panels);
    }

    const BlockPanels<Coded>& panels_;
    const int num_rows_, num_tiles_;
    BlockSums& sums_;
    CodedRows rows_;
    WideChunk chunk_;
};

}  // namespace quire::QUIRE_ISA
