// Packs matrices into panels, and reads rows back.
//
// Codes are packed 256 inputs of a panel at a time, which fit into the first cache: they are read or made output by
// output, transposed in registers, and written in whole lines.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "coded.h"
#include "kernels_of_set.h"
#include "make_codes.h"
#include "make_compact.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Inputs to pack for all 16 rows before the next ones, so that writes stay in the cache.
constexpr int kInputsAtOnce = 256;

// Four columns of four words.
struct Columns {
    typedef std::uint32_t Words __attribute__((vector_size(16)));
    Words column[4];

    // Transposes four rows of 16 bytes in registers.
    Columns(const void* from, std::size_t row_bytes) {
        Words rows[4];
        for (int i = 0; i < 4; ++i) std::memcpy(&rows[i], static_cast<const std::byte*>(from) + i * row_bytes, 16);
        const Words low01 = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
        const Words low23 = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
        const Words high01 = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
        const Words high23 = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
        column[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
        column[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
        column[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
        column[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
    }

    void put_words(void* to, std::size_t column_bytes) const {
        for (int i = 0; i < 4; ++i) std::memcpy(static_cast<std::byte*>(to) + i * column_bytes, &column[i], 16);
    }
    // As eight columns of four half words.
    void put_halves(void* to, std::size_t column_bytes) const {
        typedef std::uint16_t Halves __attribute__((vector_size(16)));
        for (int i = 0; i < 4; ++i) {
            const auto halves = (Halves)column[i];
            const Halves apart = __builtin_shufflevector(halves, halves, 0, 2, 4, 6, 1, 3, 5, 7);
            auto* first = static_cast<std::byte*>(to) + 2 * i * column_bytes;
            std::memcpy(first, &apart, 8);
            std::memcpy(first + column_bytes, reinterpret_cast<const std::byte*>(&apart) + 8, 8);
        }
    }
};

// The rows of the lanes of a panel, from an input on; lanes without a row are zero.
template <typename Number>
struct Lanes {
    const Number* first;
    std::size_t stride;
    int count;
    Number zero;
};

// Packs inputs `start` … `end` - 1 of a panel; `start` is the first of a step.
template <typename Number>
void fill_panel(const Panels<Number>& place, const Lanes<Number>& lanes, int start, int end) {
    constexpr int kInputs = Step<Number>::kInputs, kAtOnce = 16 / sizeof(Number);
    int input = start;
    for (; lanes.count == kPanelWidth && input + kAtOnce <= end; input += kAtOnce) {
        auto* to = const_cast<Number*>(place.at(input / kInputs));
        for (int lane = 0; lane < kPanelWidth; lane += 4) {
            const Columns columns(lanes.first + (input - start) + lane * lanes.stride, lanes.stride * sizeof(Number));
            if constexpr (kInputs * sizeof(Number) == 4) {
                columns.put_words(to + lane * kInputs, place.step * sizeof(Number));
            } else {
                columns.put_halves(to + lane * kInputs, place.step * sizeof(Number));
            }
        }
    }
    for (; input < end; input += kInputs) {
        auto* to = const_cast<Number*>(place.at(input / kInputs));
        const Number* from = lanes.first + (input - start);
        for (int lane = 0; lane < kPanelWidth; ++lane) {
            for (int i = 0; i < kInputs; ++i) {
                const bool filled = lane < lanes.count && input + i < end;
                to[lane * kInputs + i] = filled ? from[lane * lanes.stride + i] : lanes.zero;
            }
        }
    }
}

template <typename Number>
void pack_of(const Number* rows, const MatrixView& matrix, int first_panel, int num_panels) {
    const std::size_t num_inputs = matrix.num_inputs;
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        const Panels<Number> place = panels_from<Number>(matrix, panel, 1);
        const int num_rows = least(kPanelWidth, matrix.num_outputs - panel * kPanelWidth);
        for (int start = 0; start < matrix.num_inputs; start += kInputsAtOnce) {
            const Number* from = rows + panel * num_inputs * kPanelWidth + start;
            fill_panel<Number>(place, {from, num_inputs, num_rows, Number(0)}, start,
                               least(matrix.num_inputs, start + kInputsAtOnce));
        }
    }
}

#if defined(__AVX2__)
// False: some numbers have no room.
bool pack_compact(const std::uint16_t* rows, const MatrixView& matrix, int first_panel, int num_panels) {
    const std::size_t num_inputs = matrix.num_inputs;
    alignas(kLineBytes) std::uint16_t numbers[kChunkInputs * kGroupPanels * kPanelWidth];
    for (int first = first_panel; first < first_panel + num_panels; first += kGroupPanels) {
        for (int start = 0; start < matrix.num_inputs; start += kChunkInputs) {
            const int end = least(matrix.num_inputs, start + kChunkInputs);
            for (int p = 0; p < kGroupPanels; ++p) {
                const std::size_t output = static_cast<std::size_t>(first + p) * kPanelWidth;
                const int filled = std::clamp(matrix.num_outputs - static_cast<int>(output), 0, kPanelWidth);
                const Panels<std::uint16_t> place = {numbers + p * kRegisterNumbers, kRecordNumbers, 1};
                fill_panel<std::uint16_t>(place, {rows + output * num_inputs + start, num_inputs, filled, 0}, 0,
                                          end - start);
            }
            std::byte* chunk = const_cast<std::byte*>(compact_group_of(matrix, first).at(start));
            if (!put_chunk(numbers, num_steps<std::uint16_t>(end - start), chunk)) return false;
        }
    }
    return true;
}

void unpack_compact(const MatrixView& matrix, int row, float* output) {
    constexpr int kInputs = Step<Compact>::kInputs;
    const int first = row % (kGroupPanels * kPanelWidth) * kInputs;  // the place of the row's numbers in a record
    const auto is_of_row = [&](int place) { return place % kRecordNumbers / kInputs * kInputs == first; };
    for (int start = 0; start < matrix.num_inputs; start += kChunkInputs) {
        const std::byte* chunk = compact_group_of(matrix, row / kPanelWidth).at(start);
        const auto& head = *reinterpret_cast<const CompactHead*>(chunk);
        for (int i = 0; i < least(kChunkInputs, matrix.num_inputs - start); ++i) {
            const std::byte* record = chunk + sizeof head + i / kInputs * kRecordBytes;
            output[start + i] = widened(number_in(record, head, first + i % kInputs));
        }
        for (int k = 0; k < head.num_exceptions; ++k) {
            const auto [place, number] = head.exceptions[k];
            if (is_of_row(place)) output[start + place / kRecordNumbers * kInputs + place % kInputs] = widened(number);
        }
    }
}
#endif

// The lane of an output in a chunk of coded panels.
struct CodedLane {
    std::byte* chunk;
    CodedLayout layout;
    int panel, lane;  // in the group, in the panel

    // Four bytes of the lane, in a line of a unit.
    std::byte* word(int unit, int line) const {
        return unit_at(unit) + line * layout.line_bytes() + (panel * kPanelWidth + lane) * kStepInputs;
    }
    // The scale of a group of inputs, or their minimum.
    std::byte* scale(int group, bool minimum) const {
        const int unit = group / layout.groups(), own = group % layout.groups();
        return unit_at(unit) + layout.code_bytes() + (minimum ? layout.scale_bytes() : 0) + own * layout.group_bytes() +
               (panel * kPanelWidth + lane) * layout.coding.scale_bytes();
    }
    // The factor of nested scales, or of nested minimums.
    std::byte* outer(bool minimum) const {
        return chunk + (minimum ? layout.outer_bytes() : 0) + layout.factor_bytes() * (panel * kPanelWidth + lane);
    }

  private:
    std::byte* unit_at(int unit) const { return chunk + layout.head_bytes() + unit * layout.unit_bytes(); }
};

CodedLane lane_of(const MatrixView& matrix, int row, int input) {
    const CodedPanels panels = coded_panels_from(matrix, row / kPanelWidth, 1);
    return {const_cast<std::byte*>(panels.at(input)), panels.layout, panels.place, row % kPanelWidth};
}

// The weights of 256 inputs of a panel, output by output, and the codes step by step: steps[i] has the codes of four
// inputs of each output.
struct PanelCodes {
    CodedInputs outputs[kPanelWidth];
    std::byte steps[kCodedInputs / kStepInputs][kStepBytes];

    void turn(int num_inputs) {
        for (int lane = 0; lane < kPanelWidth; lane += 4) {
            for (int step = 0; step < num_inputs / kStepInputs; step += 4) {
                const Columns columns(outputs[lane].codes + step * kStepInputs, sizeof(CodedInputs));
                columns.put_words(steps[step] + lane * kStepInputs, kStepBytes);
            }
        }
    }
};

// Writes the lines of a panel in a unit, from the steps of the unit: one for each bit of a code.
template <int kBits>
void put_unit(const std::byte (*steps)[kStepBytes], std::byte* to, std::size_t line_bytes) {
    constexpr int kLow = low_bits(kBits), kSteps = line_steps(kBits), kMore = kBits - kLow;
    Ints lines[kBits];
    QUIRE_UNROLLED for (int line = 0; line < kBits; ++line) lines[line] = broadcast_int(0);
    QUIRE_UNROLLED for (int step = 0; step < kUnitSteps; ++step) {
        const Ints codes = load_step(steps[step]);
        QUIRE_FOR_PARTS(i) {
            if constexpr (kBits == 8) {
                lines[step].part[i] = codes.part[i] ^ every_byte(kFlip);
            } else {
                const IntPart low = codes.part[i] & every_byte((1 << kLow) - 1);
                lines[step / kSteps].part[i] |= low << kLow * (step % kSteps);
                if constexpr (kMore > 0) {
                    const IntPart high = codes.part[i] >> kLow & every_byte((1 << kMore) - 1);
                    lines[low_lines(kBits) + step * kMore / 8].part[i] |= high << step * kMore % 8;
                }
            }
        }
    }
    QUIRE_UNROLLED for (int line = 0; line < kBits; ++line) {
        QUIRE_FOR_PARTS(i) std::memcpy(to + line * line_bytes + i * kPartBytes, &lines[line].part[i], kPartBytes);
    }
}

template <int kBits>
void put_units(const PanelCodes& from, const CodedLane& first, int num_inputs) {
    std::byte* to = first.word(0, 0);
    for (int input = 0; input < num_inputs; input += kUnitInputs, to += first.layout.unit_bytes()) {
        put_unit<kBits>(from.steps + input / kStepInputs, to, first.layout.line_bytes());
    }
}

void put_codes(const PanelCodes& from, const CodedLane& first, int num_inputs) {
    switch (first.layout.coding.bits) {
        case 2:
            return put_units<2>(from, first, num_inputs);
        case 3:
            return put_units<3>(from, first, num_inputs);
        case 4:
            return put_units<4>(from, first, num_inputs);
        case 5:
            return put_units<5>(from, first, num_inputs);
        case 6:
            return put_units<6>(from, first, num_inputs);
        default:
            return put_units<8>(from, first, num_inputs);
    }
}

// Writes the scales of a panel, or its minimums.
void put_scales(const PanelCodes& from, CodedInputs::Scales CodedInputs::* which, const CodedLane& first,
                int num_groups, bool minimums) {
    const Coding& coding = first.layout.coding;
    const std::size_t width = first.layout.factor_bytes();
    for (int lane = 0; coding.nested() && lane < kPanelWidth; ++lane) {
        const CodedInputs::Scales& scales = from.outputs[lane].*which;
        const void* factor = &scales.floats[0];
        if (coding.scales == ScaleType::kNestedE4m3) factor = &scales.factor;
        std::memcpy(first.outer(minimums) + lane * width, factor, width);
    }
    for (int g = 0; g < num_groups; ++g) {
        std::byte* to = first.scale(g, minimums);
        for (int lane = 0; lane < kPanelWidth; ++lane) {
            const CodedInputs::Scales& scales = from.outputs[lane].*which;
            if (coding.scales == ScaleType::kFloat16) {
                std::memcpy(to + 2 * lane, &scales.floats[g], 2);
            } else {
                std::memcpy(to + lane, &scales.bytes[g], 1);
            }
        }
    }
}

// Up to 256 weights of a row as codes.
void code_inputs(const MatrixRows& rows, StoredType as, int row, int start, int count, CodedInputs& to) {
    const auto* from = static_cast<const std::byte*>(rows.data) + row * row_bytes(rows.type, rows.num_inputs) +
                       row_bytes(rows.type, start);
    if (has_blocks(rows.type)) return read_blocks(rows.type, from, count, to);
    const bool minimums = coding_of(as).minimums;
    if (rows.type == StoredType::kFloat32) return make_codes(reinterpret_cast<const float*>(from), count, minimums, to);
    make_codes(reinterpret_cast<const std::uint16_t*>(from), count, minimums, to);
}

void pack_coded(const MatrixRows& rows, const MatrixView& matrix, StoredType as, int first_panel, int num_panels) {
    PanelCodes codes = {};
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        const int first = panel * kPanelWidth, filled = least(kPanelWidth, matrix.num_outputs - first);
        if (filled < kPanelWidth) codes = {};  // lanes without an output
        for (int start = 0; start < matrix.num_inputs; start += kCodedInputs) {
            const int count = least(kCodedInputs, matrix.num_inputs - start), padded = round_up(count, kCodedGroup);
            for (int lane = 0; lane < filled; ++lane) {
                code_inputs(rows, as, first + lane, start, count, codes.outputs[lane]);
            }
            codes.turn(padded);
            const int num_groups = padded / matrix.coding.group;
            const CodedLane to = lane_of(matrix, first, start);
            put_codes(codes, to, padded);
            put_scales(codes, &CodedInputs::scales, to, num_groups, false);
            if (matrix.coding.minimums) put_scales(codes, &CodedInputs::minimums, to, num_groups, true);
        }
    }
}

float half_at(const std::byte* from) {
    std::uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return from_float16(half);
}

float scale_at(const CodedLane& lane, int group, bool minimum) {
    const std::byte* scale = lane.scale(group, minimum);
    const auto byte = static_cast<std::int8_t>(*scale);
    switch (lane.layout.coding.scales) {
        case ScaleType::kFloat16:
            return half_at(scale);
        case ScaleType::kNested:
            return half_at(lane.outer(minimum)) * table_of(lane.layout.coding).factor * static_cast<float>(byte);
        case ScaleType::kNestedE4m3: {
            float factor;
            std::memcpy(&factor, lane.outer(minimum), sizeof factor);
            return factor * from_e4m3(byte);
        }
        default:
            return from_power(byte);
    }
}

int code_at(const CodedLane& lane, int input) {
    const Coding& coding = lane.layout.coding;
    const int step = input % kUnitInputs / kStepInputs;
    const auto byte = [&](int line) {
        return std::to_integer<int>(lane.word(input / kUnitInputs, line)[input % kStepInputs]);
    };
    if (coding.bits == 8) return static_cast<std::int8_t>(byte(step) ^ kFlip);
    const int low = low_bits(coding.bits), steps = line_steps(coding.bits), more = coding.bits - low;
    const int code = byte(step / steps) >> step % steps * low & ((1 << low) - 1);
    if (more == 0) return number_of(coding, code);
    const int high = byte(low_lines(coding.bits) + step * more / 8) >> step * more % 8 & ((1 << more) - 1);
    return number_of(coding, code | high << low);
}

void unpack_coded(const MatrixView& matrix, int row, float* output) {
    for (int start = 0; start < matrix.num_inputs; start += kCodedInputs) {
        const int count = least(kCodedInputs, matrix.num_inputs - start);
        const CodedLane lane = lane_of(matrix, row, start);
        for (int i = 0; i < count; ++i) {
            const int group = i / matrix.coding.group;
            const float weight = scale_at(lane, group, false) * static_cast<float>(code_at(lane, i));
            output[start + i] = matrix.coding.minimums ? weight + scale_at(lane, group, true) : weight;
        }
    }
}

float as_float(float weight) { return weight; }
float as_float(std::uint16_t weight) { return widened(weight); }

template <typename Number>
void unpack_of(const MatrixView& matrix, int row, float* output) {
    const Panels<Number> place = panels_from<Number>(matrix, row / kPanelWidth, 1);
    for (int i = 0; i < matrix.num_inputs; ++i) output[i] = as_float(*weight_at(place, i, row % kPanelWidth));
}

}  // namespace

std::size_t packed_bytes(const MatrixView& matrix) {
    switch (matrix.type) {
        case NumberType::kFloat32:
            return panel_bytes<float>(matrix);
        case NumberType::kBfloat16:
            return panel_bytes<std::uint16_t>(matrix);
#if defined(__AVX2__)
        case NumberType::kCompact:
            return compact_bytes(matrix);
#endif
        default:
            return coded_bytes(matrix);
    }
}

bool pack_panels(const MatrixRows& rows, const MatrixView& matrix, StoredType as, void* panels, int first_panel,
                 int num_panels) {
    MatrixView packed = matrix;
    packed.panels = panels;
    switch (matrix.type) {
        case NumberType::kFloat32:
            pack_of(static_cast<const float*>(rows.data), packed, first_panel, num_panels);
            return true;
        case NumberType::kBfloat16:
            pack_of(static_cast<const std::uint16_t*>(rows.data), packed, first_panel, num_panels);
            return true;
#if defined(__AVX2__)
        case NumberType::kCompact:
            return pack_compact(static_cast<const std::uint16_t*>(rows.data), packed, first_panel, num_panels);
#endif
        default:
            pack_coded(rows, packed, as, first_panel, num_panels);
            return true;
    }
}

void unpack_row(const MatrixView& matrix, int row, float* output) {
    switch (matrix.type) {
        case NumberType::kFloat32:
            return unpack_of<float>(matrix, row, output);
        case NumberType::kBfloat16:
            return unpack_of<std::uint16_t>(matrix, row, output);
#if defined(__AVX2__)
        case NumberType::kCompact:
            return unpack_compact(matrix, row, output);
#endif
        default:
            return unpack_coded(matrix, row, output);
    }
}

}  // namespace quire::QUIRE_ISA
