// Tests the emulated tiles alone: an instruction gives results worked out by hand, and each misuse on which the
// processor faults ends the program. Prints each failure and exits with 1 if there was any.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#define QUIRE_ISA emulation
#define QUIRE_EMULATE_TILES
#include "testing.h"
#include "tiles.h"

namespace {

namespace tiles = quire::emulation::tiles;
using quire::testing::expect;
using quire::testing::nearest_bfloat16;

constexpr int kSums = 0, kRows = 1, kWeights = 2, kNone = 7;

// Three rows of two pairs, times two pairs of five outputs.
tiles::Configuration small() {
    tiles::Configuration configuration;
    const int rows[] = {3, 3, 2}, words[] = {5, 2, 5};
    for (int tile = 0; tile < 3; ++tile) {
        configuration.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
        configuration.row_bytes[tile] = static_cast<std::uint16_t>(4 * words[tile]);
    }
    return configuration;
}

// One row of two pairs, times two pairs of one output.
float product(float sum, const float (&row)[4], const float (&weights)[4]) {
    tiles::Configuration configuration = small();
    configuration.rows[kSums] = configuration.rows[kRows] = 1;
    configuration.row_bytes[kSums] = configuration.row_bytes[kWeights] = 4;
    std::uint16_t halves[2][4];
    for (int i = 0; i < 4; ++i) {
        halves[0][i] = nearest_bfloat16(row[i]);
        halves[1][i] = nearest_bfloat16(weights[i]);
    }
    const tiles::Configured configured(configuration);
    tiles::load<kSums>(&sum, 4);
    tiles::load<kRows>(halves[0], 8);
    tiles::load<kWeights>(halves[1], 4);
    tiles::multiply<kSums, kRows, kWeights>();
    tiles::store<kSums>(&sum, 4);
    return sum;
}

void test_rows_and_columns() {
    std::uint16_t rows[3][6], weights[2][12];
    float sums[3][6];
    for (int r = 0; r < 3; ++r) {
        for (int i = 0; i < 6; ++i) rows[r][i] = nearest_bfloat16(static_cast<float>(1 + r * 4 + i));
        for (float& sum : sums[r]) sum = 100.0F;
    }
    for (int k = 0; k < 2; ++k) {
        for (int i = 0; i < 12; ++i) weights[k][i] = nearest_bfloat16(static_cast<float>(i - 5 * k));
    }
    const tiles::Configured configured(small());
    tiles::load<kSums>(sums, sizeof sums[0]);
    tiles::load<kRows>(rows, sizeof rows[0]);
    tiles::load<kWeights>(weights, sizeof weights[0]);
    tiles::multiply<kSums, kRows, kWeights>();
    tiles::store<kSums>(sums, sizeof sums[0]);
    for (int r = 0; r < 3; ++r) {
        for (int n = 0; n < 6; ++n) {
            float expected = 100.0F;
            for (int i = 0; n < 5 && i < 4; ++i) {
                expected += static_cast<float>((1 + r * 4 + i) * (2 * n + i % 2 - 5 * (i / 2)));
            }
            expect(sums[r][n] == expected, "row %d, output %d: %g, not %g", r, n, sums[r][n], expected);
        }
    }
}

void test_order() {
    constexpr float kHalfStep = 0x1.0p-24;  // adding it alone to 1 changes nothing
    const float ones[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    expect(product(0.0F, {1.0F, kHalfStep, 0.0F, kHalfStep}, ones) == 1.0F + 0x1.0p-23F, "second ones go together");
    expect(product(0.0F, {1.0F, 0.0F, kHalfStep, kHalfStep}, ones) == 1.0F, "first ones go together");
    expect(product(1.0F, {kHalfStep, kHalfStep, 0.0F, 0.0F}, ones) == 1.0F + 0x1.0p-23F, "the sum comes last");
    expect(product(-0x1.02p0F, {0x1.02p0F, 0.0F, 0.0F, 0.0F}, ones) == 0.0F, "one row of one output");
    const float square = product(0.0F, {-1.0F, 0.0F, 0x1.02p0F, 0.0F}, {1.0F, 0.0F, 0x1.02p0F, 0.0F});
    expect(square == 0x1.02p0F * 0x1.02p0F - 1.0F, "a product is not rounded");
}

void test_small_numbers_are_zero() {
    constexpr float kSmall = 0x1.0p-127F, kLeast = 0x1.0p-126F;
    const float ones[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    expect(product(0.0F, {kSmall, 0.0F, kSmall, 0.0F}, ones) == 0.0F, "inputs");
    expect(product(0.0F, {kLeast, 0.0F, 0.0F, 0.0F}, {0.5F, 0.0F, 0.0F, 0.0F}) == 0.0F, "products");
    expect(product(kSmall, {kSmall, 0.0F, 0.0F, 0.0F}, ones) == 0.0F, "sums");
    expect(product(0.0F, {kLeast, 0.0F, 0.0F, 0.0F}, ones) == kLeast, "the least normal number");
}

// Runs in a separate process, so that this process survives.
template <typename Misuse>
void expect_fault(const char* what, Misuse misuse) {
    const pid_t child = fork();
    if (child == 0) {
        std::fclose(stderr);
        misuse();
        _exit(0);
    }
    int status = 0;
    const bool waited = child > 0 && waitpid(child, &status, 0) == child;
    expect(waited && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "no fault: %s", what);
}

template <typename Change>
void expect_wrong_configuration(const char* what, Change change) {
    expect_fault(what, [&] {
        tiles::Configuration configuration = small();
        change(configuration);
        tiles::configure(configuration);
    });
}

template <typename Change>
void expect_wrong_product(const char* what, Change change) {
    expect_fault(what, [&] {
        tiles::Configuration configuration = small();
        change(configuration);
        tiles::configure(configuration);
        tiles::multiply<kSums, kRows, kWeights>();
    });
}

void test_faults() {
    using Configuration = tiles::Configuration;
    expect_wrong_configuration("palette", [](Configuration& each) { each.palette = 2; });
    expect_wrong_configuration("reserved byte", [](Configuration& each) { each.reserved[13] = 1; });
    expect_wrong_configuration("ninth tile", [](Configuration& each) { each.rows[8] = each.row_bytes[8] = 4; });
    expect_wrong_configuration("17 rows", [](Configuration& each) { each.rows[0] = 17; });
    expect_wrong_configuration("68 bytes", [](Configuration& each) { each.row_bytes[0] = 68; });
    expect_wrong_configuration("no bytes", [](Configuration& each) { each.row_bytes[0] = 0; });
    expect_wrong_configuration("no rows", [](Configuration& each) { each.rows[0] = 0; });

    expect_wrong_product("rows", [](Configuration& each) { each.rows[kRows] = 2; });
    expect_wrong_product("outputs", [](Configuration& each) { each.row_bytes[kWeights] = 16; });
    expect_wrong_product("pairs", [](Configuration& each) { each.row_bytes[kRows] = 12; });
    expect_wrong_product("half a number",
                         [](Configuration& each) { each.row_bytes[kSums] = each.row_bytes[kWeights] = 18; });
    expect_wrong_product("no configuration", [](Configuration& each) { each.palette = 0; });

    float numbers[16];
    expect_fault("loaded before a configuration", [&] { tiles::load<kSums>(numbers, 64); });
    expect_fault("stored after a release", [&] {
        {
            const tiles::Configured configured(small());
        }
        tiles::store<kSums>(numbers, 64);
    });
    expect_fault("a tile that is not configured", [&] {
        const tiles::Configured configured(small());
        tiles::load<kNone>(numbers, 64);
    });
    expect_fault("one tile twice", [&] {
        const tiles::Configured configured(small());
        tiles::multiply<kSums, kRows, kRows>();
    });
}

}  // namespace

int main() {
    test_rows_and_columns();
    test_order();
    test_small_numbers_are_zero();
    test_faults();
    return quire::testing::exit_status();
}
