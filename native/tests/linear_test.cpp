// Packs matrices and multiplies rows by them. Compares the products with sums in double precision, and with plain
// sums that round as the instruction set does. Then cuts the work in every way and compares bits. Prints each
// failure and exits with 1 if there was any.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "quire/blocks.h"
#include "quire/kernels.h"
#include "testing.h"

namespace {

using quire::Activation;
using quire::CodedInputs;
using quire::Kernels;
using quire::LinearTile;
using quire::MatrixView;
using quire::NumberType;
using quire::Rows;
using quire::ScaleType;
using quire::StoredType;
using quire::testing::expect;
using quire::testing::Random;
using quire::testing::same_bits;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUntouched = 12345.0F;  // in memory that must not be written
constexpr double kRounding = 0x1.0p-24;
constexpr int kMostRows = 13;

// How a set of kernels multiplies numbers of one type.
struct Arithmetic {
    Arithmetic(const Kernels& kernels, NumberType type)
        : pairs(quire::testing::multiplies_pairs(kernels, type)),
          tiles(quire::testing::multiplies_tiles(kernels, type)),
          fused(std::strcmp(kernels.name, "portable") != 0),
          together(pairs ? 2 : 1) {}

    // A number of a row as the kernels round it.
    float taken(float input) const {
        return pairs ? quire::testing::from_bfloat16(quire::testing::nearest_bfloat16(input)) : input;
    }
    float add(float sum, float input, float weight) const {
        return fused ? std::fma(input, weight, sum) : sum + input * weight;
    }

    bool pairs;    // rows are rounded to bfloat16, and the second input of a pair is added first
    bool tiles;    // the even inputs and the odd inputs of 32 are added up, then both to the sum
    bool fused;    // a product is not rounded before it is added
    int together;  // adjacent inputs of an output
};

// Codes made from floats as codes.md describes them: kQ8_0, or kQ4_1 with minimums.
void make_plain_codes(StoredType type, const float* numbers, int num_inputs, CodedInputs& to) {
    constexpr std::uint16_t kNan = 0x7e00;
    const bool minimums = type == StoredType::kQ4_1;
    const int lowest_code = minimums ? 0 : -127, highest_code = minimums ? 15 : 127;
    to = {};
    for (int start = 0, group = 0; start < num_inputs; start += quire::kCodedGroup, ++group) {
        const float *first = numbers + start, *end = numbers + std::min(start + quire::kCodedGroup, num_inputs);
        const auto [lowest, highest] = std::minmax_element(first, end);
        const std::uint16_t minimum = minimums ? quire::to_float16(*lowest) : 0;
        const float base = quire::from_float16(minimum);
        const float wanted = minimums ? std::max(0.0F, *highest - base) / 15.0F : std::max(-*lowest, *highest) / 127.0F;
        std::uint16_t half = quire::to_float16(wanted);
        if (!minimums && quire::from_float16(half) < wanted) ++half;
        const float scale = quire::from_float16(half);
        const bool usable = std::all_of(first, end, [](float x) { return std::isfinite(x); }) && std::isfinite(base) &&
                            std::isfinite(scale);
        to.scales.floats[group] = usable ? half : kNan;
        to.minimums.floats[group] = usable ? minimum : kNan;
        for (const float* number = first; usable && number < end; ++number) {
            const float code = std::nearbyint((*number - base) * (scale > 0.0F ? 1.0F / scale : 0.0F));
            to.codes[number - numbers] = static_cast<std::int8_t>(
                std::clamp(code, static_cast<float>(lowest_code), static_cast<float>(highest_code)));
        }
    }
}

// A row of inputs, and what the groups of 32 of them are as int8.
struct InputRow {
    InputRow(const float* row, int num_inputs) : numbers(row) {
        for (int first = 0; first < num_inputs; first += quire::kRowGroup) {
            groups.emplace_back(std::vector<float>(row + first, row + std::min(first + quire::kRowGroup, num_inputs)));
        }
    }

    const float* numbers;
    std::vector<quire::testing::Quantized> groups;
};

// The products of the inputs of a row that share a scale.
struct GroupProduct {
    float row_scale, scale, minimum;
    std::int64_t sum, sum_of_row;
};

// How a matrix is stored: its type, and whether bfloat16 becomes compact.
struct Stored {
    Stored(StoredType as, bool compact = false) : as(as), compact(compact) {}

    NumberType packed() const { return compact ? NumberType::kCompact : quire::packed_type(as); }

    StoredType as;
    bool compact;
};

// A random matrix: as numbers, as rows, and packed as a stored type. Codes are made from floats; with a bias, from
// bfloat16 rows. Each form has memory of exactly its size, so that the address sanitizer detects a read past the end.
struct Matrix {
    Matrix(const Kernels& kernels, Stored stored, int num_outputs, int num_inputs, bool with_bias, Random& random)
        : Matrix(kernels, stored, num_outputs, num_inputs,
                 numbers_for(stored, static_cast<std::size_t>(num_outputs) * num_inputs, random),
                 stored.as == StoredType::kBfloat16 || (with_bias && quire::has_blocks(stored.as))
                     ? StoredType::kBfloat16
                     : StoredType::kFloat32) {
        if (with_bias) set_bias(random);
    }
    Matrix(const Kernels& kernels, Stored stored, int num_outputs, int num_inputs, std::vector<float> numbers,
           StoredType row_type)
        : arithmetic(kernels, stored.packed()), values(std::move(numbers)), as(stored.as) {
        view.type = stored.packed();
        rows.type = row_type;
        given.resize(values.size() * (row_type == StoredType::kFloat32 ? 4 : 2));
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (row_type == StoredType::kFloat32) {
                std::memcpy(given.data() + 4 * i, &values[i], 4);
            } else {
                const std::uint16_t word = quire::testing::nearest_bfloat16(values[i]);
                std::memcpy(given.data() + 2 * i, &word, 2);
                values[i] = quire::testing::from_bfloat16(word);
            }
        }
        pack(kernels, num_outputs, num_inputs, [&](int output, int start, int count) {
            make_plain_codes(as, values.data() + static_cast<std::size_t>(output) * num_inputs + start, count,
                             coded[output].back());
        });
    }
    // With random blocks, whose scales are small numbers of either sign.
    Matrix(const Kernels& kernels, StoredType as, int num_outputs, int num_inputs, Random& random)
        : arithmetic(kernels, NumberType::kCoded), values(static_cast<std::size_t>(num_outputs) * num_inputs), as(as) {
        view.type = NumberType::kCoded;
        const std::size_t bytes = quire::row_bytes(as, num_inputs),
                          block = quire::row_bytes(as, quire::block_inputs(as));
        rows.type = as;
        given.resize(num_outputs * bytes);
        for (std::byte& byte : given) byte = static_cast<std::byte>(random.below(256));
        for (std::size_t at = 0; at < given.size(); at += block) set_scales(given.data() + at, block, random);
        pack(kernels, num_outputs, num_inputs, [&](int output, int start, int count) {
            const std::byte* from = given.data() + output * bytes + quire::row_bytes(as, start);
            quire::read_blocks(as, from, count, coded[output].back());
        });
    }
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;

    void set_bias(Random& random) {
        bias = random.numbers(view.num_outputs);
        bias.resize(view.num_panels() * quire::kPanelWidth, 0.0F);
        view.bias = bias.data();
    }

    const char* name() const { return quire::testing::name_of(view.type); }

    // The groups of up to 256 inputs.
    std::vector<GroupProduct> groups_of(const InputRow& row, int output, int start) const {
        const quire::Coding& coding = view.coding;
        const CodedInputs& codes = coded[output][start / quire::kCodedInputs];
        std::vector<GroupProduct> groups;
        for (int i = start; i < std::min(start + quire::kCodedInputs, view.num_inputs); i += coding.group) {
            const int first = i / quire::kRowGroup * quire::kRowGroup;
            const quire::testing::Quantized& numbers = row.groups[i / quire::kRowGroup];
            GroupProduct group = {numbers.scale, scale_of(codes.scales, i - start), 0.0F, 0, 0};
            if (coding.minimums) group.minimum = scale_of(codes.minimums, i - start);
            for (int k = i; k < std::min(i + coding.group, view.num_inputs); ++k) {
                group.sum += std::int64_t{numbers.q[k - first]} * number_of(coding, codes.codes[k - start]);
                group.sum_of_row += numbers.q[k - first];
            }
            groups.push_back(group);
        }
        return groups;
    }

    // The product with a row, and the largest error of a float sum.
    double product(const InputRow& row, int output, double* bound) const {
        double total = view.bias == nullptr ? 0.0 : bias[output], size = std::fabs(total);
        const auto add = [&](double term) {
            total += term;
            size += std::fabs(term);
        };
        if (view.type == NumberType::kCoded) {
            for (int start = 0; start < view.num_inputs; start += quire::kCodedInputs) {
                for (const GroupProduct& group : groups_of(row, output, start)) {
                    add(static_cast<double>(group.sum) * group.row_scale * group.scale);
                    add(static_cast<double>(group.sum_of_row) * group.row_scale * group.minimum);
                }
            }
        } else {
            for (int i = 0; i < view.num_inputs; ++i) {
                add(static_cast<double>(arithmetic.taken(row.numbers[i])) * value(output, i));
            }
        }
        *bound = size * (view.num_inputs + 4) * kRounding;
        return total;
    }

    // The product, added up as the kernels do.
    float exact_product(const InputRow& row, int output) const {
        float sum = 0.0F;
        if (view.type == NumberType::kCoded) {
            for (int start = 0; start < view.num_inputs; start += quire::kCodedInputs) {
                const std::vector<GroupProduct> groups = groups_of(row, output, start);
                for (const GroupProduct& group : groups) {
                    sum = arithmetic.add(sum, static_cast<float>(group.sum), group.scale * group.row_scale);
                }
                if (!view.coding.minimums) continue;
                for (const GroupProduct& group : groups) {
                    sum = arithmetic.add(sum, group.row_scale * static_cast<float>(group.sum_of_row), group.minimum);
                }
            }
            return view.bias == nullptr ? sum : sum + bias[output];
        }
        const auto is_exception = [&](int i) {
            const float size = std::fabs(value(output, i));
            return view.type == NumberType::kCompact && size != 0.0F && (size < 0x1.0p-20F || size > 1.0F);
        };
        const auto add = [&](float& to, int i) {
            to = arithmetic.add(to, arithmetic.taken(row.numbers[i]), is_exception(i) ? 0.0F : value(output, i));
        };
        const int together = arithmetic.tiles ? 32 : arithmetic.together;
        for (int start = 0; start < view.num_inputs; start += together) {
            const int end = std::min(start + together, view.num_inputs);
            if (arithmetic.tiles) {
                float parts[2] = {};
                for (int i = start; i < end; ++i) add(parts[i % 2], i);
                sum += parts[0] + parts[1];
            } else {
                for (int i = end - 1; i >= start; --i) add(sum, i);
            }
            // At the end of a chunk.
            for (int i = start / 256 * 256; (end % 256 == 0 || end == view.num_inputs) && i < end; ++i) {
                if (is_exception(i)) sum += arithmetic.taken(row.numbers[i]) * value(output, i);
            }
        }
        return view.bias == nullptr ? sum : sum + bias[output];
    }

    float value(int output, int input) const {
        return values[static_cast<std::size_t>(output) * view.num_inputs + input];
    }

    Arithmetic arithmetic;
    std::vector<float> values;                    // as the kernels see them
    std::vector<std::byte> given;                 // the rows
    std::vector<std::vector<CodedInputs>> coded;  // of each output
    std::vector<std::byte> panels;
    std::vector<float> bias;
    StoredType as;
    quire::MatrixRows rows;
    MatrixView view;

  private:
    // Numbers of a compact matrix have one of eight exponents, or are exceptions: a few are far smaller or larger.
    static std::vector<float> numbers_for(Stored stored, std::size_t count, Random& random) {
        std::vector<float> numbers = random.numbers(count);
        for (std::size_t i = 0; stored.compact && i < count; ++i) {
            numbers[i] = std::copysign(std::clamp(std::fabs(numbers[i]), 0x1.0p-7F, 0.99F), numbers[i]);
            const int kind = random.below(700);
            if (kind < 3) numbers[i] *= kind == 0 ? 0.0F : kind == 1 ? 0x1.0p-40F : 0x1.0p30F;
        }
        return numbers;
    }

    // Packs the rows. `code(output, start, count)` writes the codes of some inputs to coded[output].back().
    template <typename Code>
    void pack(const Kernels& kernels, int num_outputs, int num_inputs, Code code) {
        view.num_outputs = rows.num_outputs = num_outputs;
        view.num_inputs = rows.num_inputs = num_inputs;
        if (view.type == NumberType::kCoded) view.coding = quire::coding_of(as);
        coded.resize(num_outputs);
        for (int output = 0; view.type == NumberType::kCoded && output < num_outputs; ++output) {
            for (int start = 0; start < num_inputs; start += quire::kCodedInputs) {
                const int count = std::min(quire::kCodedInputs, num_inputs - start);
                coded[output].emplace_back();
                code(output, start, count);
                for (int i = 0; i < count; ++i) values[output * num_inputs + start + i] = weight_of(output, start, i);
            }
        }
        rows.data = given.data();
        panels.resize(kernels.packed_bytes(view), std::byte{0xff});
        kernels.pack_panels(rows, view, as, panels.data(), 0, view.num_panels());
        view.panels = panels.data();
    }

    float scale_of(const CodedInputs::Scales& scales, int input) const {
        const std::int8_t byte = scales.bytes[input / view.coding.group];
        switch (view.coding.scales) {
            case ScaleType::kFloat16:
                return quire::from_float16(scales.floats[input / 32]);
            case ScaleType::kNested:
                return quire::from_float16(scales.floats[0]) * quire::table_of(view.coding).factor *
                       static_cast<float>(byte);
            case ScaleType::kNestedE4m3:
                return scales.factor * quire::from_e4m3(byte);
            default:
                return std::ldexp(1.0F, static_cast<std::uint8_t>(byte) - 127);
        }
    }

    float weight_of(int output, int start, int input) const {
        const CodedInputs& codes = coded[output][start / quire::kCodedInputs];
        const int number = number_of(view.coding, codes.codes[input]);
        const float weight = scale_of(codes.scales, input) * static_cast<float>(number);
        return view.coding.minimums ? weight + scale_of(codes.minimums, input) : weight;
    }

    // Sets the float16 numbers of a block, at its beginning or its end, to numbers near 1/100.
    void set_scales(std::byte* block, std::size_t bytes, Random& random) const {
        if (as == StoredType::kNvfp4) return set_nvfp4_scales(block, random);
        if (as == StoredType::kMxfp4) {
            block[0] = static_cast<std::byte>(117 + random.below(8));  // 2^-10 to 2^-3
            return;
        }
        if (as >= StoredType::kTernary) {  // quire's own blocks: two codes a byte
            const int most = (1 << quire::coding_of(as).bits) - 1;
            for (std::size_t i = bytes - quire::kCodedInputs / 2; i < bytes; ++i) {
                block[i] &= static_cast<std::byte>(0x11 * most);
            }
        }
        const bool last = as == StoredType::kQ6K || as == StoredType::kQ3K || as == StoredType::kQ2K;
        std::byte* first = last ? block + bytes - (as == StoredType::kQ2K ? 4 : 2) : block;
        const bool two = quire::coding_of(as).minimums;
        for (int i = 0; i <= (two ? 1 : 0); ++i) {
            const std::uint16_t half = quire::to_float16(random.numbers(1)[0] / 100);
            std::memcpy(first + 2 * i, &half, sizeof half);
        }
    }

    // Sets the scales to numbers with all exponents, and their factor to one of either sign near 1/100.
    static void set_nvfp4_scales(std::byte* block, Random& random) {
        const float factor = random.numbers(1)[0] / 100;
        std::memcpy(block, &factor, sizeof factor);
        for (int i = 4; i < 6; ++i) block[i] = static_cast<std::byte>(random.below(0x7f));
    }
};

struct Shape {
    int num_outputs, num_inputs;
};

const Shape kShapes[] = {{1, 1}, {7, 5}, {16, 16}, {33, 40}, {70, 67}, {145, 19}};

int stride_of(const Matrix& matrix) { return matrix.view.num_panels() * quire::kPanelWidth + 3; }

LinearTile whole(const Matrix& matrix, int num_rows) {
    return {.first_row = 0, .num_rows = num_rows, .first_panel = 0, .num_panels = matrix.view.num_panels()};
}

// Rows in every form that products need.
class Input {
  public:
    Input(const Kernels& kernels, const Rows& rows, int num_inputs, int num_rows)
        : parts_(quire::RoundedRows::bytes(num_inputs, num_rows)), input{rows, {parts_.data(), num_rows}} {
        for (int row = 0; row < num_rows; ++row) kernels.round_row(input, {true, true}, num_inputs, row);
    }

  private:
    std::vector<std::byte> parts_;

  public:
    const quire::LinearInput input;
};

void multiply(const Kernels& kernels, const MatrixView& matrix, const Rows& rows, const Rows& output,
              const LinearTile& tile, bool accumulate) {
    const Input rounded(kernels, rows, matrix.num_inputs, tile.first_row + tile.num_rows);
    kernels.linear(matrix, rounded.input, output, tile, accumulate);
}

void multiply_gated(const Kernels& kernels, const MatrixView& gate, const MatrixView& up, const Rows& rows,
                    const Rows& output, const LinearTile& tile, Activation activation) {
    const Input rounded(kernels, rows, gate.num_inputs, tile.first_row + tile.num_rows);
    kernels.gated_linear(gate, up, rounded.input, output, tile, activation);
}

void expect_rows(const Kernels& kernels, const Matrix& matrix) {
    std::vector<float> row(matrix.view.num_inputs);
    for (int output = 0; output < matrix.view.num_outputs; ++output) {
        kernels.unpack_row(matrix.view, output, row.data());
        expect(same_bits(row.data(), matrix.values.data() + static_cast<std::size_t>(output) * row.size(), row.size()),
               "%s %s: unpacked row %d of %d x %d", kernels.name, matrix.name(), output, matrix.view.num_outputs,
               matrix.view.num_inputs);
    }
    std::vector<std::byte> piecewise(matrix.panels.size(), std::byte{0xee});
    // The panels of a compact group are packed together.
    const int together = matrix.view.type == NumberType::kCompact ? 4 : 1, num_panels = matrix.view.num_panels();
    for (int panel = (num_panels - 1) / together * together; panel >= 0; panel -= together) {
        const int count = std::min(together, num_panels - panel);
        kernels.pack_panels(matrix.rows, matrix.view, matrix.as, piecewise.data(), panel, count);
    }
    expect(piecewise == matrix.panels, "%s %s: %d x %d packed panel by panel", kernels.name, matrix.name(),
           matrix.view.num_outputs, matrix.view.num_inputs);
}

// The bytes of a coded matrix as coded.h describes them. `flip` is added to the bits of codes of 8 bits.
std::vector<std::byte> described(const Matrix& matrix, int flip) {
    const quire::Coding& coding = matrix.view.coding;
    const int num_panels = matrix.view.num_panels(), num_inputs = quire::round_up(matrix.view.num_inputs, 32);
    std::vector<std::byte> bytes;
    const auto add = [&](unsigned number, int count) {
        for (int i = 0; i < count; ++i) bytes.push_back(static_cast<std::byte>(number >> 8 * i));
    };
    for (int panel = 0; panel < num_panels; panel += 4) {
        const int first = panel * 16, end = std::min(panel + 4, num_panels) * 16;
        const CodedInputs none = {};
        for (int start = 0; start < num_inputs; start += 256) {
            const auto codes_of = [&](int output) -> const CodedInputs& {
                return output < matrix.view.num_outputs ? matrix.coded[output][start / 256] : none;
            };
            const auto add_scales = [&](CodedInputs::Scales CodedInputs::* which, int group) {
                for (int output = first; output < end; ++output) {
                    const CodedInputs::Scales& scales = codes_of(output).*which;
                    if (group < 0 && coding.scales == ScaleType::kNestedE4m3) {
                        unsigned factor;
                        std::memcpy(&factor, &scales.factor, sizeof factor);
                        add(factor, 4);
                        continue;
                    }
                    if (group < 0 || coding.scale_bytes() == 2) {
                        add(scales.floats[std::max(group, 0)], 2);
                    } else {
                        add(static_cast<std::uint8_t>(scales.bytes[group]), 1);
                    }
                }
            };
            if (coding.nested()) add_scales(&CodedInputs::scales, -1);
            if (coding.nested() && coding.minimums) add_scales(&CodedInputs::minimums, -1);
            for (int unit = 0; unit < std::min(256, num_inputs - start); unit += 32) {
                for (int line = 0; line < coding.bits; ++line) {
                    for (int output = first; output < end; ++output) {
                        for (int k = 0; k < 4; ++k) {
                            // Bits low … low + count - 1 of the codes of consecutive steps.
                            const int first_bits = coding.bits == 8 ? 8 : coding.bits < 4 ? 2 : 4;
                            const int first_lines = coding.bits == 8 ? 8 : first_bits;
                            const bool upper = line >= first_lines;
                            const int low = upper ? first_bits : 0, count = upper ? coding.bits - low : first_bits;
                            const int num_steps = 8 / count;
                            unsigned byte = 0;
                            for (int i = 0; i < num_steps; ++i) {
                                const int step = (upper ? line - first_lines : line) * num_steps + i;
                                const unsigned code =
                                    static_cast<std::uint8_t>(codes_of(output).codes[unit + 4 * step + k]);
                                byte |= (code >> low & ((1U << count) - 1)) << count * i;
                            }
                            add(coding.bits == 8 ? byte ^ flip : byte, 1);
                        }
                    }
                }
                for (int group = unit / coding.group; group < (unit + 32) / coding.group; ++group) {
                    add_scales(&CodedInputs::scales, group);
                }
                for (int group = unit / coding.group; coding.minimums && group < (unit + 32) / coding.group; ++group) {
                    add_scales(&CodedInputs::minimums, group);
                }
            }
        }
    }
    return bytes;
}

void test_coded_layout(const Kernels& kernels, const Matrix& matrix) {
    const bool is_described = matrix.panels == described(matrix, 0) ||
                              (matrix.view.coding.bits == 8 && matrix.panels == described(matrix, 128));
    expect(is_described, "%s type %d: layout of %d x %d", kernels.name, static_cast<int>(matrix.as),
           matrix.view.num_outputs, matrix.view.num_inputs);
}

void test_packing(const Kernels& kernels, Stored type) {
    Random random(1);
    for (const Shape& shape : kShapes) {
        const Matrix matrix(kernels, type, shape.num_outputs, shape.num_inputs, false, random);
        expect_rows(kernels, matrix);
        if (matrix.view.type == NumberType::kCoded) {
            test_coded_layout(kernels, matrix);
            continue;
        }
        if (type.compact) continue;
        const auto value_at = [&](std::size_t place) {
            if (type.as == StoredType::kFloat32) return reinterpret_cast<const float*>(matrix.panels.data())[place];
            return quire::testing::from_bfloat16(reinterpret_cast<const std::uint16_t*>(matrix.panels.data())[place]);
        };
        // [out / 64][in / together][4 panels][16 outputs][together]
        const int together = matrix.arithmetic.together, num_panels = matrix.view.num_panels();
        const int padded_inputs = quire::round_up(shape.num_inputs, together);
        bool as_described = true;
        for (int output = 0; output < num_panels * 16; ++output) {
            const int panel = output / 16, first = panel / 4 * 4, in_group = std::min(4, num_panels - first);
            for (int i = 0; i < padded_inputs; ++i) {
                const int step = i / together * in_group + panel - first;
                const float packed = value_at(static_cast<std::size_t>(first) * 16 * padded_inputs +
                                              (step * 16 + output % 16) * together + i % together);
                const bool filled = output < shape.num_outputs && i < shape.num_inputs;
                as_described &= packed == (filled ? matrix.value(output, i) : 0.0F);
            }
        }
        expect(matrix.panels.size() == static_cast<std::size_t>(num_panels) * 16 * padded_inputs *
                                           (type.as == StoredType::kFloat32 ? 4 : 2),
               "%s: size of %d x %d", kernels.name, shape.num_outputs, shape.num_inputs);
        expect(as_described, "%s: layout of %d x %d", kernels.name, shape.num_outputs, shape.num_inputs);
    }
}

// Every block type, in rows of several blocks: the weights, the bytes that they take, and every bit of their products.
void test_blocks(const Kernels& kernels, StoredType type) {
    Random random(static_cast<int>(type));
    for (const Shape& shape : {Shape{70, 256}, Shape{16, 1280}, Shape{21, 512}}) {
        const int num_inputs = quire::block_inputs(type) == 32 ? shape.num_inputs + 96 : shape.num_inputs;
        const Matrix matrix(kernels, type, shape.num_outputs, num_inputs, random);
        expect_rows(kernels, matrix);
        test_coded_layout(kernels, matrix);
        std::vector<float> row(num_inputs);
        for (int output = 0; output < shape.num_outputs; ++output) {
            quire::widen_row(type, matrix.given.data() + output * quire::row_bytes(type, num_inputs), num_inputs,
                             row.data());
            expect(
                same_bits(row.data(), matrix.values.data() + static_cast<std::size_t>(output) * num_inputs, num_inputs),
                "block type %d: row %d widened", static_cast<int>(type), output);
        }
        const int stride = stride_of(matrix);
        for (const int num_rows : {1, 2, 7, 9, 65}) {
            std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * num_inputs);
            std::vector<float> output(static_cast<std::size_t>(num_rows) * stride, kUntouched);
            const Rows from{input.data(), num_inputs}, to{output.data(), stride};
            multiply(kernels, matrix.view, from, to, whole(matrix, num_rows), false);
            for (int r = 0; r < num_rows; ++r) {
                const InputRow inputs(from.row(r), num_inputs);
                for (int column = 0; column < shape.num_outputs; ++column) {
                    const float expected = matrix.exact_product(inputs, column);
                    expect(to.row(r)[column] == expected, "%s block type %d: row %d of %d, column %d: %g, not %g",
                           kernels.name, static_cast<int>(type), r, num_rows, column, to.row(r)[column], expected);
                }
            }
        }
    }
}

// Gate and up of two types: the same numbers as from one product after the other.
void test_mixed_gate(const Kernels& kernels) {
    Random random(9);
    std::vector<Stored> types = {StoredType::kFloat32, StoredType::kQ8_0, StoredType::kQ4_1, StoredType::kBfloat16};
    if (kernels.has_compact) types.emplace_back(StoredType::kBfloat16, true);
    for (const Stored& of_gate : types) {
        for (const Stored& of_up : types) {
            const Matrix gate(kernels, of_gate, 150, 67, true, random), up(kernels, of_up, 150, 67, true, random);
            const int stride = stride_of(gate);
            for (const int num_rows : {1, 9, 70}) {
                std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * 67);
                std::vector<float> gated(static_cast<std::size_t>(num_rows) * stride), up_alone = gated, output = gated;
                const Rows from{input.data(), 67};
                multiply(kernels, gate.view, from, {gated.data(), stride}, whole(gate, num_rows), false);
                multiply(kernels, up.view, from, {up_alone.data(), stride}, whole(up, num_rows), false);
                multiply_gated(kernels, gate.view, up.view, from, {output.data(), stride}, whole(gate, num_rows),
                               Activation::kRelu);
                for (std::size_t i = 0; i < output.size(); ++i) {
                    const float share = gated[i] < 0.0F ? 0.0F : gated[i];
                    expect(output[i] == share * up_alone[i], "%s: gate is %s and up is %s", kernels.name, gate.name(),
                           up.name());
                }
            }
        }
    }
}

// Checks an output except for its numbers: nothing is written past the panels, and padding columns are those of
// a product with zeros.
void expect_edges(const Kernels& kernels, const Matrix& matrix, const std::vector<float>& output, int num_rows,
                  float padding) {
    const int stride = stride_of(matrix), padded = matrix.view.num_panels() * quire::kPanelWidth;
    for (int row = 0; row < num_rows; ++row) {
        for (int column = matrix.view.num_outputs; column < stride; ++column) {
            const float value = output[static_cast<std::size_t>(row) * stride + column];
            expect(value == (column < padded ? padding : kUntouched), "%s: row %d column %d of %d holds %g",
                   kernels.name, row, column, matrix.view.num_outputs, value);
        }
    }
}

void test_linear(const Kernels& kernels, Stored type) {
    Random random(2);
    for (const Shape& shape : kShapes) {
        for (const bool with_bias : {false, true}) {
            const Matrix matrix(kernels, type, shape.num_outputs, shape.num_inputs, with_bias, random);
            const int stride = stride_of(matrix);
            for (int num_rows = 1; num_rows <= kMostRows; ++num_rows) {
                std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * shape.num_inputs);
                std::vector<float> output(static_cast<std::size_t>(num_rows) * stride, kUntouched);
                const Rows from{input.data(), shape.num_inputs}, to{output.data(), stride};
                multiply(kernels, matrix.view, from, to, whole(matrix, num_rows), false);
                expect_edges(kernels, matrix, output, num_rows, 0.0F);
                std::vector<float> twice = output;
                const Rows to_twice{twice.data(), stride};
                multiply(kernels, matrix.view, from, to_twice, whole(matrix, num_rows), true);
                expect_edges(kernels, matrix, twice, num_rows, 0.0F);
                for (int row = 0; row < num_rows; ++row) {
                    const InputRow inputs(from.row(row), shape.num_inputs);
                    for (int column = 0; column < shape.num_outputs; ++column) {
                        double bound;
                        const double expected = matrix.product(inputs, column, &bound);
                        const float once = to.row(row)[column];
                        expect(std::fabs(once - expected) <= bound,
                               "%s %s: %d x %d, row %d of %d, column %d: %g, not %g", kernels.name, matrix.name(),
                               shape.num_outputs, shape.num_inputs, row, num_rows, column, once, expected);
                        // Accumulating the same product doubles it, and doubling does not round.
                        expect(to_twice.row(row)[column] == 2 * once, "%s: accumulated row %d column %d", kernels.name,
                               row, column);
                    }
                }
            }
        }
    }
}

// Every sum has the bits of the plain sum, with rows and inputs for several blocks and chunks.
void test_order_of_sums(const Kernels& kernels, Stored type) {
    Random random(6);
    for (const Shape& shape : {Shape{70, 1}, Shape{37, 255}, Shape{150, 256}, Shape{270, 257}, Shape{21, 1100}}) {
        const Matrix matrix(kernels, type, shape.num_outputs, shape.num_inputs, true, random);
        const int stride = stride_of(matrix);
        for (const int num_rows : {1, 2, 6, 7, 16, 17, 21, 33, 35, 61, 64, 65, 131}) {
            std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * shape.num_inputs);
            std::vector<float> output(static_cast<std::size_t>(num_rows) * stride, kUntouched);
            const Rows from{input.data(), shape.num_inputs}, to{output.data(), stride};
            multiply(kernels, matrix.view, from, to, whole(matrix, num_rows), false);
            expect_edges(kernels, matrix, output, num_rows, 0.0F);
            for (int row = 0; row < num_rows; ++row) {
                const InputRow inputs(from.row(row), shape.num_inputs);
                for (int column = 0; column < shape.num_outputs; ++column) {
                    const float expected = matrix.exact_product(inputs, column);
                    expect(to.row(row)[column] == expected, "%s %s: %d x %d, row %d of %d, column %d: %g, not %g",
                           kernels.name, matrix.name(), shape.num_outputs, shape.num_inputs, row, num_rows, column,
                           to.row(row)[column], expected);
                }
            }
        }
    }
}

double active(double x, Activation activation) {
    switch (activation) {
        case Activation::kSilu:
            return x / (1.0 + std::exp(-x));
        case Activation::kGeluTanh:
            return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
        case Activation::kGelu:
            return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
        case Activation::kQuickGelu:
            return x / (1.0 + std::exp(-1.702 * x));
        case Activation::kRelu:
            return x < 0.0 ? 0.0 : x;
        case Activation::kReluSquared:
            return x < 0.0 ? 0.0 : x * x;
        case Activation::kClampedSwiglu:
            return std::min(x, 7.0) / (1.0 + std::exp(-1.702 * std::min(x, 7.0)));
    }
    return 0.0;
}

double factor_of(double up, Activation activation) {
    return activation == Activation::kClampedSwiglu ? std::clamp(up, -7.0, 7.0) + 1.0 : up;
}

void test_gated_linear(const Kernels& kernels, Stored type) {
    Random random(3);
    for (const Shape& shape : kShapes) {
        for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu,
                                            Activation::kQuickGelu, Activation::kRelu, Activation::kClampedSwiglu}) {
            const bool with_bias = activation == Activation::kSilu;
            const Matrix gate(kernels, type, shape.num_outputs, shape.num_inputs, with_bias, random);
            const Matrix up(kernels, type, shape.num_outputs, shape.num_inputs, with_bias, random);
            const int stride = stride_of(gate);
            for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
                std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * shape.num_inputs);
                std::vector<float> output(static_cast<std::size_t>(num_rows) * stride, kUntouched);
                const Rows from{input.data(), shape.num_inputs}, to{output.data(), stride};
                multiply_gated(kernels, gate.view, up.view, from, to, whole(gate, num_rows), activation);
                expect_edges(kernels, gate, output, num_rows, 0.0F);
                for (int row = 0; row < num_rows; ++row) {
                    const InputRow inputs(from.row(row), shape.num_inputs);
                    for (int column = 0; column < shape.num_outputs; ++column) {
                        double gate_bound, up_bound;
                        const double gated = gate.product(inputs, column, &gate_bound);
                        const double raised = factor_of(up.product(inputs, column, &up_bound), activation);
                        const double share = active(gated, activation), expected = share * raised;
                        // No activation is steeper than 1.2; its own error is a few roundings of its input.
                        const double share_bound = 1.2 * gate_bound + 8 * kRounding * std::fabs(gated);
                        const double bound = share_bound * (std::fabs(raised) + up_bound) +
                                             std::fabs(share) * up_bound + 2 * kRounding * std::fabs(expected);
                        expect(std::fabs(to.row(row)[column] - expected) <= bound,
                               "%s %s: activation %d, %d x %d, row %d of %d, column %d: %g, not %g", kernels.name,
                               gate.name(), static_cast<int>(activation), shape.num_outputs, shape.num_inputs, row,
                               num_rows, column, to.row(row)[column], expected);
                    }
                }
            }
        }
    }
}

// The three products of a tile of rows and panels, with one signature.
enum class Product { kLinear, kAccumulated, kGated };

struct Products {
    const Kernels& kernels;
    const Matrix& matrix;
    const Matrix& up;
    Product product;

    void operator()(const Rows& from, const Rows& to, const LinearTile& tile) const {
        if (product == Product::kGated) {
            multiply_gated(kernels, matrix.view, up.view, from, to, tile, Activation::kSilu);
        } else {
            multiply(kernels, matrix.view, from, to, tile, product == Product::kAccumulated);
        }
    }
};

// Cutting 13 rows and 10 panels into equal pieces of any size gives the same bits as one row and one
// panel at a time.
void test_cuts(const Products& multiply, const std::vector<float>& input, const std::vector<float>& before,
               const std::vector<float>& expected) {
    const int num_panels = multiply.matrix.view.num_panels(), stride = stride_of(multiply.matrix);
    const Rows from{const_cast<float*>(input.data()), multiply.matrix.view.num_inputs};
    for (int rows_at_once = 1; rows_at_once <= kMostRows; ++rows_at_once) {
        for (int panels_at_once = 1; panels_at_once <= num_panels; ++panels_at_once) {
            std::vector<float> output = before;
            for (int row = 0; row < kMostRows; row += rows_at_once) {
                for (int panel = 0; panel < num_panels; panel += panels_at_once) {
                    multiply(from, {output.data(), stride},
                             {.first_row = row,
                              .num_rows = std::min(rows_at_once, kMostRows - row),
                              .first_panel = panel,
                              .num_panels = std::min(panels_at_once, num_panels - panel)});
                }
            }
            expect(same_bits(output, expected), "%s %s: product %d in tiles of %d rows and %d panels",
                   multiply.kernels.name, multiply.matrix.name(), static_cast<int>(multiply.product), rows_at_once,
                   panels_at_once);
        }
    }
}

// A row has the same bits at every place among any number of neighbours, even NaN.
void test_neighbours(const Products& multiply, const std::vector<float>& input, const std::vector<float>& before,
                     const std::vector<float>& expected) {
    const int num_inputs = multiply.matrix.view.num_inputs, stride = stride_of(multiply.matrix);
    for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 35, 49, 64}) {
        for (int place = 0; place < num_rows; ++place) {
            const int source = (place * 5 + num_rows) % kMostRows;
            std::vector<float> among(static_cast<std::size_t>(num_rows) * num_inputs, kNan);
            std::vector<float> output(static_cast<std::size_t>(num_rows) * stride, kNan);
            const auto own_input = input.begin() + static_cast<std::ptrdiff_t>(source) * num_inputs;
            const auto own_before = before.begin() + static_cast<std::ptrdiff_t>(source) * stride;
            std::copy_n(own_input, num_inputs, among.begin() + static_cast<std::ptrdiff_t>(place) * num_inputs);
            std::copy_n(own_before, stride, output.begin() + static_cast<std::ptrdiff_t>(place) * stride);
            multiply({among.data(), num_inputs}, {output.data(), stride}, whole(multiply.matrix, num_rows));
            expect(same_bits(output.data() + static_cast<std::size_t>(place) * stride,
                             expected.data() + static_cast<std::size_t>(source) * stride, stride),
                   "%s %s: product %d, a row at place %d of %d", multiply.kernels.name, multiply.matrix.name(),
                   static_cast<int>(multiply.product), place, num_rows);
        }
    }
}

void test_same_bits(const Kernels& kernels, Stored type) {
    Random random(4);
    const Matrix matrix(kernels, type, 150, 37, true, random), up(kernels, type, 150, 37, true, random);
    const int stride = stride_of(matrix), num_inputs = matrix.view.num_inputs;
    const std::vector<float> input = random.numbers(static_cast<std::size_t>(kMostRows) * num_inputs);
    for (const Product product : {Product::kLinear, Product::kAccumulated, Product::kGated}) {
        const Products multiply{kernels, matrix, up, product};
        const std::vector<float> before = random.numbers(static_cast<std::size_t>(kMostRows) * stride);
        std::vector<float> expected = before;
        for (int row = 0; row < kMostRows; ++row) {
            for (int panel = 0; panel < matrix.view.num_panels(); ++panel) {
                std::vector<float> alone = before;
                multiply({const_cast<float*>(input.data()), num_inputs}, {alone.data(), stride},
                         {.first_row = row, .num_rows = 1, .first_panel = panel, .num_panels = 1});
                const std::size_t start = static_cast<std::size_t>(row) * stride + panel * quire::kPanelWidth;
                std::copy_n(alone.begin() + start, quire::kPanelWidth, expected.begin() + start);
                std::copy_n(before.begin() + start, quire::kPanelWidth, alone.begin() + start);
                expect(same_bits(alone, before), "%s: a tile writes outside of itself", kernels.name);
            }
        }
        test_cuts(multiply, input, before, expected);
        test_neighbours(multiply, input, before, expected);
    }
}

// Two things change no column except the padding: any numbers in the padding before it is accumulated into, and an
// infinite input, which turns the padding's zeros into NaN.
void test_padding_is_harmless(const Kernels& kernels, Stored type) {
    Random random(5);
    const Matrix matrix(kernels, type, 21, 30, false, random);
    const int stride = stride_of(matrix);
    std::vector<float> input = random.numbers(30), clean(stride, 1.0F), soiled(stride, kNan);
    std::fill_n(soiled.begin(), 21, 1.0F);
    multiply(kernels, matrix.view, {input.data(), 30}, {clean.data(), stride}, whole(matrix, 1), true);
    multiply(kernels, matrix.view, {input.data(), 30}, {soiled.data(), stride}, whole(matrix, 1), true);
    expect(same_bits(clean.data(), soiled.data(), 21), "%s: padding columns that hold NaN", kernels.name);
    input[3] = std::numeric_limits<float>::infinity();
    multiply(kernels, matrix.view, {input.data(), 30}, {clean.data(), stride}, whole(matrix, 1), false);
    for (int column = 0; column < 21; ++column) {
        expect(!std::isfinite(clean[column]), "%s %s: an infinite input shows in column %d", kernels.name,
               matrix.name(), column);
    }
}

// Every bfloat16 is unpacked as it was, and numbers of too many sizes do not fit.
void test_what_is_compact(const Kernels& kernels) {
    constexpr int kNumInputs = 512, kNumOutputs = 64, kMostExceptions = 55;
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(kNumInputs) * kNumOutputs);
    MatrixView view = {.type = NumberType::kCompact, .num_outputs = kNumOutputs, .num_inputs = kNumInputs};
    const quire::MatrixRows from = {rows.data(), StoredType::kBfloat16, kNumOutputs, kNumInputs};
    std::vector<std::byte> panels(kernels.packed_bytes(view));
    view.panels = panels.data();
    const auto packs = [&] { return kernels.pack_panels(from, view, StoredType::kBfloat16, panels.data(), 0, 4); };
    expect(panels.size() < rows.size() * 2 * 0.77, "%s: compact matrices are smaller", kernels.name);
    std::vector<float> row(kNumInputs);
    for (int first = 0; first < 65536; first += 300) {
        // One number of 15 adjacent exponents everywhere, except for 50 of every kind: NaN, infinite, subnormal.
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint16_t>(0x3f00 + i * 7919 % 1920);
        for (int i = 0; i < 50; ++i) rows[i * 6 + 256] = static_cast<std::uint16_t>(first + i * 6);
        expect(packs(), "%s: 50 numbers from %d on have no room", kernels.name, first);
        for (int output = 0; output < kNumOutputs; ++output) {
            kernels.unpack_row(view, output, row.data());
            for (int i = 0; i < kNumInputs; ++i) {
                const float number = quire::testing::from_bfloat16(rows[output * kNumInputs + i]);
                expect(same_bits(&row[i], &number, 1), "%s: number %d of output %d", kernels.name, i, output);
            }
        }
    }
    std::fill(rows.begin(), rows.end(), 0x3f80);
    for (int i = 0; i < kMostExceptions; ++i) rows[i] = 0x4f80;
    expect(packs(), "%s: no room for %d exceptions", kernels.name, kMostExceptions);
    rows[kMostExceptions] = 0x4f80;
    expect(!packs(), "%s: room for too many exceptions", kernels.name);
}

// Rows that need care as codes: zeros, very small and very large numbers, ties, and numbers that are not finite.
void test_int8_edges(const Kernels& kernels) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMost = 1e36F;
    constexpr int kNumInputs = 5;
    // 127 gives a factor of 1, so halves are ties, which round to even.
    const std::vector<float> rows = {0,      0,         0, 0, 0, 127,   0.5F,   1.5F, -2.5F, -0.5F,
                                     1e-42F, -1e-42F,   0, 0, 0, kMost, -kMost, 0,    1,     0,
                                     1,      kInfinity, 0, 0, 0, 1,     2,      kNan, 0,     0};
    const Matrix matrix(kernels, StoredType::kQ8_0, 6, kNumInputs, rows, StoredType::kFloat32);
    test_coded_layout(kernels, matrix);
    test_coded_layout(kernels, {kernels, StoredType::kQ4_1, 6, kNumInputs, rows, StoredType::kFloat32});
    const float expected[][kNumInputs] = {
        {0, 0, 0, 0, 0}, {127, 0, 2, -2, 0}, {0, 0, 0, 0, 0}, {kMost, -kMost, 0, 0, 0}};
    float row[kNumInputs];
    for (int output = 0; output < 6; ++output) {
        kernels.unpack_row(matrix.view, output, row);
        for (int i = 0; i < kNumInputs; ++i) {
            if (output >= 3) {  // also a number that is too large for a scale in float16
                expect(std::isnan(row[i]), "%s: row %d holds %g at %d, not NaN", kernels.name, output, row[i], i);
            } else {
                expect(std::fabs(row[i] - expected[output][i]) <= 1e-6F * std::fabs(expected[output][i]),
                       "%s: row %d holds %g at %d, not %g", kernels.name, output, row[i], i, expected[output][i]);
            }
        }
    }
    // The same rows as inputs of a product: one that is not finite has no finite output, and the others are right.
    std::vector<float> identity(static_cast<std::size_t>(kNumInputs) * kNumInputs, 0.0F);
    for (int i = 0; i < kNumInputs; ++i) identity[i * (kNumInputs + 1)] = 127.0F;  // a scale of 1
    const Matrix one(kernels, StoredType::kQ8_0, kNumInputs, kNumInputs, identity, StoredType::kFloat32);
    std::vector<float> input = rows, output(static_cast<std::size_t>(6) * 16);
    multiply(kernels, one.view, {input.data(), kNumInputs}, {output.data(), 16}, whole(one, 6), false);
    for (int r = 0; r < 6; ++r) {
        for (int i = 0; i < kNumInputs; ++i) {
            const float value = output[r * 16 + i] / 127.0F;
            const bool right =
                r >= 4 ? !std::isfinite(value) : std::fabs(value - expected[r][i]) <= 1e-6F * std::fabs(expected[r][i]);
            expect(right, "%s: row %d times one holds %g at %d", kernels.name, r, value, i);
        }
    }
}

// NaN weights, in the second group of panels and in one panel of the first, reach only their own outputs: the zeros
// that fill up inputs are not multiplied by weights of other panels.
void test_weights_stay_apart(const Kernels& kernels, Stored type) {
    Random random(7);
    const Matrix matrix(kernels, type, 150, 37, false, random);
    quire::MatrixRows from = matrix.rows;
    const std::size_t row_bytes = quire::row_bytes(from.type, 37);
    std::vector<std::byte> rows(150 * row_bytes), panels(matrix.panels.size());
    std::memcpy(rows.data(), from.data, rows.size());
    from.data = rows.data();
    const auto is_nan = [](int output) { return output / 16 == 2 || output >= 104; };
    // A compact group has room for one NaN of each output.
    const std::size_t nan_bytes = type.compact ? sizeof(std::uint16_t) : row_bytes;
    for (int output = 0; output < 150; ++output) {
        if (is_nan(output)) std::memset(rows.data() + output * row_bytes, 0xff, nan_bytes);
    }
    MatrixView view = matrix.view;
    kernels.pack_panels(from, view, type.as, panels.data(), 0, view.num_panels());
    view.panels = panels.data();
    const int stride = stride_of(matrix);
    for (const int num_rows : {1, 20}) {
        std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * 37);
        std::vector<float> expected(static_cast<std::size_t>(num_rows) * stride), output = expected;
        multiply(kernels, matrix.view, {input.data(), 37}, {expected.data(), stride}, whole(matrix, num_rows), false);
        multiply(kernels, view, {input.data(), 37}, {output.data(), stride}, whole(matrix, num_rows), false);
        for (int row = 0; row < num_rows; ++row) {
            for (int column = 0; column < 150; ++column) {
                const std::size_t place = static_cast<std::size_t>(row) * stride + column;
                const bool right = is_nan(column) ? std::isnan(output[place]) : output[place] == expected[place];
                expect(right, "%s %s: row %d of %d, column %d next to NaN weights: %g", kernels.name, matrix.name(),
                       row, num_rows, column, output[place]);
            }
        }
    }
}

}  // namespace

int main() {
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        for (const Stored type :
             {Stored(StoredType::kFloat32), Stored(StoredType::kBfloat16), Stored(StoredType::kBfloat16, true),
              Stored(StoredType::kQ8_0), Stored(StoredType::kQ4_1)}) {
            if (type.compact && !kernels.has_compact) continue;
            test_packing(kernels, type);
            test_linear(kernels, type);
            test_order_of_sums(kernels, type);
            test_gated_linear(kernels, type);
            test_same_bits(kernels, type);
            test_padding_is_harmless(kernels, type);
            test_weights_stay_apart(kernels, type);
        }
        for (int type = static_cast<int>(StoredType::kQ4_0); type <= static_cast<int>(StoredType::kIq3S); ++type) {
            test_blocks(kernels, static_cast<StoredType>(type));
        }
        if (kernels.has_compact) test_what_is_compact(kernels);
        test_mixed_gate(kernels);
        test_int8_edges(kernels);
    });
    return quire::testing::exit_status();
}
