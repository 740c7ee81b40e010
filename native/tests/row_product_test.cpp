// Multiplies rows by a matrix on teams of threads. Compares with the kernels on one row and one panel at a time. Prints
// each failure and exits with 1 if there was any.
#include "quire/row_product.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "testing.h"

namespace {

using quire::Activation;
using quire::Kernels;
using quire::MatrixRows;
using quire::RowProduct;
using quire::Rows;
using quire::StoredType;
using quire::ThreadTeam;
using quire::testing::expect;
using quire::testing::Random;
using quire::testing::same_bits;

constexpr int kNumOutputs = 150, kNumInputs = 300;

// The numbers of a matrix, in floats or bfloat16.
struct Numbers {
    Numbers(StoredType type, Random& random) : floats(random.numbers(std::size_t{kNumOutputs} * kNumInputs)) {
        for (const float number : floats) halves.push_back(quire::testing::nearest_bfloat16(number));
        rows = {.data = type == StoredType::kFloat32 ? static_cast<const void*>(floats.data()) : halves.data(),
                .type = type,
                .num_outputs = kNumOutputs,
                .num_inputs = kNumInputs};
    }

    std::vector<float> floats;
    std::vector<std::uint16_t> halves;
    MatrixRows rows;
};

// The product of each row alone, by one thread.
std::vector<float> alone(const RowProduct& product, std::vector<float>& input, int num_rows,
                         std::optional<Activation> activation) {
    const int stride = product.output_stride();
    std::vector<float> output(static_cast<std::size_t>(num_rows) * stride);
    for (int row = 0; row < num_rows; ++row) {
        product.run({input.data() + static_cast<std::size_t>(row) * kNumInputs, kNumInputs}, 1,
                    {output.data() + static_cast<std::size_t>(row) * stride, stride}, activation);
    }
    return output;
}

void test_product(const Kernels& kernels, StoredType type) {
    Random random(1);
    const Numbers matrix(type, random);
    const std::vector<float> bias = random.numbers(kNumOutputs);
    ThreadTeam one(1), three(3);
    const RowProduct single(kernels, one, matrix.rows, bias.data()), several(kernels, three, matrix.rows, bias.data());
    const RowProduct plain(kernels, one, matrix.rows, nullptr);
    expect(single.num_inputs() == kNumInputs && single.output_stride() == 160, "%s: the shape", kernels.name);
    expect(single.num_bytes() == plain.num_bytes() + 160 * sizeof(float), "%s: the bytes of a bias", kernels.name);
    for (const int num_rows : {0, 1, 3, 17, 70}) {
        std::vector<float> input = random.numbers(static_cast<std::size_t>(num_rows) * kNumInputs);
        for (const std::optional<Activation> activation : {std::optional<Activation>(), {Activation::kGelu}}) {
            std::vector<float> expected = alone(single, input, num_rows, activation);
            for (const RowProduct* product : {&single, &several}) {
                std::vector<float> output(expected.size());
                product->run({input.data(), kNumInputs}, num_rows, {output.data(), 160}, activation);
                expect(same_bits(output, expected), "%s: %d rows together and alone", kernels.name, num_rows);
            }
            if (activation) continue;
            std::vector<float> sums = alone(plain, input, num_rows, std::nullopt);
            for (int row = 0; row < num_rows; ++row) {
                for (int output = 0; output < kNumOutputs; ++output) {
                    const std::size_t at = static_cast<std::size_t>(row) * 160 + output;
                    expect(sums[at] + bias[output] == expected[at], "%s: row %d, the bias of %d", kernels.name, row,
                           output);
                }
            }
        }
    }
}

}  // namespace

int main() {
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        for (const StoredType type : {StoredType::kFloat32, StoredType::kBfloat16}) test_product(kernels, type);
    });
    return quire::testing::exit_status();
}
