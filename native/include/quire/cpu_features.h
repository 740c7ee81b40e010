// The processor features that a kernel may use on this processor and operating system.
//
// A feature counts as present only if the processor has the instructions (cpuid) and the operating
// system saves the registers that they use (XCR0, read by xgetbv). Cpuid alone is not enough: under a
// kernel or a hypervisor that does not save the wide registers, the instructions fault, or worse,
// destroy another process's register contents.
//
//     cpuid leaves ─┐
//     XCR0 ─────────┼─> decode_cpu_features ─> CpuFeatures ─> best_instruction_set
//     tile grant ───┘        (pure)                                 (pure)
//
// One function reads the machine and another decodes the result, so that tests can decode any machine.
#pragma once

#include <cstdint>

namespace quire {

struct CpuFeatures {
    bool pclmulqdq = false;  // carry-less multiplication, on narrow registers that every system saves
    bool avx2 = false;
    bool fma = false;
    bool f16c = false;
    bool avx_vnni = false;
    bool avx512f = false;
    bool avx512bw = false;
    bool avx512vl = false;
    bool avx512dq = false;
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
    bool amx_tile = false;
    bool amx_bf16 = false;
    bool amx_int8 = false;
};

// The kernels are compiled for these six sets, the best last. Each needs all features of the previous one; but the
// first processors with AVX-512 lack avx_vnni, and do not need it.
enum class InstructionSet {
    kPortable,    // plain C++
    kAvx2,        // avx2, fma, f16c
    kAvx2Vnni,    // and avx_vnni
    kAvx512,      // and avx512 f, bw, vl, dq
    kAvx512Bf16,  // and avx512 bf16, vnni
    kAmx,         // and amx tile, bf16, int8
};

// The raw words that the features are decoded from. All zero on a machine that is not x86-64.
struct CpuidWords {
    std::uint32_t leaf1_ecx = 0;
    std::uint32_t leaf7_ebx = 0;
    std::uint32_t leaf7_ecx = 0;
    std::uint32_t leaf7_edx = 0;
    std::uint32_t leaf7_1_eax = 0;
    std::uint64_t xcr0 = 0;      // 0 if the operating system does not use xsave
    bool tiles_granted = false;  // the operating system lets this process use the AMX tile registers
};

// Reads the machine. If it has tile registers, also requests them from Linux, for the entire process: a process
// may use them only after Linux has granted them.
CpuidWords read_cpuid_words();

CpuFeatures decode_cpu_features(const CpuidWords& words);

// The features of this machine, read once. Call it before any tile instruction.
const CpuFeatures& cpu_features();

bool can_use(InstructionSet instruction_set, const CpuFeatures& features);

InstructionSet best_instruction_set(const CpuFeatures& features);

// "portable", "avx2", "avx2_vnni", "avx512", "avx512_bf16" or "amx".
const char* name_of(InstructionSet instruction_set);

}  // namespace quire
