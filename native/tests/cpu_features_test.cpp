// Tests decode_cpu_features and best_instruction_set with made-up machines, then reads the real one. Prints
// each failure and exits with 1 if there was any.
#include "quire/cpu_features.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "testing.h"

namespace {

using quire::testing::expect;

void expect_set(const quire::CpuidWords& words, const char* expected, const char* what) {
    const auto features = quire::decode_cpu_features(words);
    const char* actual = quire::name_of(quire::best_instruction_set(features));
    expect(std::strcmp(actual, expected) == 0, "%s: %s, expected %s", what, actual, expected);
}

// A machine with every feature, under an operating system that saves all registers.
quire::CpuidWords full_machine() {
    quire::CpuidWords words;
    words.leaf1_ecx = (1u << 12) | (1u << 27) | (1u << 28) | (1u << 29);
    words.leaf7_ebx = (1u << 5) | (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    words.leaf7_ecx = 1u << 11;
    words.leaf7_edx = (1u << 22) | (1u << 24) | (1u << 25);
    words.leaf7_1_eax = (1u << 4) | (1u << 5);
    words.xcr0 = 0x600e7;
    words.tiles_granted = true;
    return words;
}

void test_instructions_decide() {
    expect_set(quire::CpuidWords{}, "portable", "a machine that is not x86-64");
    expect_set(full_machine(), "amx", "the full machine");

    for (const int bit : {22, 24, 25}) {
        quire::CpuidWords words = full_machine();
        words.leaf7_edx &= ~(1u << bit);
        expect_set(words, "avx512_bf16", "one AMX feature is missing");
    }
    for (const int bit : {16, 17, 30, 31}) {
        quire::CpuidWords words = full_machine();
        words.leaf7_ebx &= ~(1u << bit);
        expect_set(words, "avx2_vnni", "one of AVX-512 f, dq, bw, vl is missing");
    }
    quire::CpuidWords no_vnni = full_machine();
    no_vnni.leaf7_ecx = 0;
    expect_set(no_vnni, "avx512", "AVX-512 VNNI is missing");
    quire::CpuidWords no_bf16 = full_machine();
    no_bf16.leaf7_1_eax = 1u << 4;
    expect_set(no_bf16, "avx512", "AVX-512 BF16 is missing");
    quire::CpuidWords early = full_machine();
    early.leaf7_1_eax = 1u << 5;
    expect_set(early, "amx", "AVX-VNNI is missing, and nothing after it needs it");
    early.leaf7_ebx = 1u << 5;
    expect_set(early, "avx2", "AVX-VNNI and AVX-512 are missing");
    for (const int bit : {12, 28, 29}) {
        quire::CpuidWords words = full_machine();
        words.leaf1_ecx &= ~(1u << bit);
        expect_set(words, "portable", "one of FMA, AVX, F16C is missing");
    }
    quire::CpuidWords no_avx2 = full_machine();
    no_avx2.leaf7_ebx &= ~(1u << 5);
    expect_set(no_avx2, "portable", "AVX2 is missing");
}

void test_operating_system_decides() {
    quire::CpuidWords words = full_machine();
    words.tiles_granted = false;
    expect_set(words, "avx512_bf16", "the operating system keeps the tiles");
    words = full_machine();
    words.xcr0 = 0x200e7;
    expect_set(words, "avx512_bf16", "tile data is not saved");
    words.xcr0 = 0xe7;
    expect_set(words, "avx512_bf16", "no tile state is saved");
    for (const std::uint64_t missing : {0x20u, 0x40u, 0x80u}) {
        words.xcr0 = 0x600e7 & ~missing;
        expect_set(words, "avx2_vnni", "AVX-512 state is not saved whole");
    }
    for (const std::uint64_t missing : {0x2u, 0x4u}) {
        words.xcr0 = 0x600e7 & ~missing;
        expect_set(words, "portable", "AVX state is not saved whole");
    }
    words.xcr0 = 0;
    const quire::CpuFeatures none = quire::decode_cpu_features(words);
    expect(!none.avx2 && !none.fma && !none.f16c, "no xsave, no AVX2, FMA, F16C");
    expect(!none.avx_vnni, "no xsave, no AVX-VNNI");
    expect(!none.avx512f && !none.avx512_bf16 && !none.avx512_vnni, "no xsave, no AVX-512");
    expect(!none.amx_tile && !none.amx_bf16 && !none.amx_int8, "no xsave, no AMX");
}

void test_each_bit_is_its_own() {
    quire::CpuidWords words = full_machine();
    words.leaf7_ebx &= ~(1u << 30);
    const quire::CpuFeatures no_bw = quire::decode_cpu_features(words);
    expect(!no_bw.avx512bw && no_bw.avx512f && no_bw.avx512vl && no_bw.avx512dq, "only bw is gone");
    words = full_machine();
    words.leaf7_edx &= ~(1u << 22);
    const quire::CpuFeatures no_amx_bf16 = quire::decode_cpu_features(words);
    expect(!no_amx_bf16.amx_bf16 && no_amx_bf16.amx_tile && no_amx_bf16.amx_int8, "only amx_bf16 is gone");
}

void test_this_machine() {
    const quire::CpuFeatures& features = quire::cpu_features();
    expect(&features == &quire::cpu_features(), "decided once");
    std::printf("this machine: %s\n", quire::name_of(quire::best_instruction_set(features)));
}

}  // namespace

int main() {
    test_instructions_decide();
    test_operating_system_decides();
    test_each_bit_is_its_own();
    test_this_machine();
    return quire::testing::exit_status();
}
