#include "quire/cpu_features.h"

#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)
#define QUIRE_X86_64 1
#include <cpuid.h>
#else
#define QUIRE_X86_64 0
#endif

#if QUIRE_X86_64 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

constexpr bool has_bit(std::uint64_t word, int bit) { return ((word >> bit) & 1) != 0; }

constexpr bool has_all(std::uint64_t word, std::uint64_t mask) { return (word & mask) == mask; }

// Register state in XCR0, as numbered in the processor manuals.
constexpr std::uint64_t kAvxState = (1u << 1) | (1u << 2);                 // xmm, ymm
constexpr std::uint64_t kAvx512State = (1u << 5) | (1u << 6) | (1u << 7);  // k, zmm
constexpr std::uint64_t kTileState = (1u << 17) | (1u << 18);              // tilecfg, tiledata

constexpr bool has_tiles(const CpuidWords& words) {
    return has_all(words.xcr0, kTileState) && has_bit(words.leaf7_edx, 24);
}

#if QUIRE_X86_64

std::uint64_t read_xcr0() {
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

// A process must request the tile registers from Linux. Linux refuses if it is older than 5.16, if a
// system call filter forbids it, or if a thread's signal stack is too small to save them.
bool request_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestState = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
    return true;
#endif
}

#endif  // QUIRE_X86_64

}  // namespace

CpuidWords read_cpuid_words() {
    CpuidWords words;
#if QUIRE_X86_64
    std::uint32_t eax = 0;
    std::uint32_t ebx = 0;
    std::uint32_t ecx = 0;
    std::uint32_t edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
        return words;
    }
    words.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
        words.leaf7_ebx = ebx;
        words.leaf7_ecx = ecx;
        words.leaf7_edx = edx;
        const std::uint32_t last_subleaf = eax;
        if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
            words.leaf7_1_eax = eax;
        }
    }
    constexpr int kOsxsave = 27;  // xgetbv itself faults without it
    if (has_bit(words.leaf1_ecx, kOsxsave)) {
        words.xcr0 = read_xcr0();
    }
    if (has_tiles(words)) {
        words.tiles_granted = request_tiles();
    }
#endif
    return words;
}

CpuFeatures decode_cpu_features(const CpuidWords& words) {
    const bool avx = has_all(words.xcr0, kAvxState) && has_bit(words.leaf1_ecx, 28);
    const bool avx512f = avx && has_all(words.xcr0, kAvx512State) && has_bit(words.leaf7_ebx, 16);
    const bool tile = has_tiles(words) && words.tiles_granted;

    CpuFeatures features;
    features.pclmulqdq = has_bit(words.leaf1_ecx, 1);
    features.avx2 = avx && has_bit(words.leaf7_ebx, 5);
    features.fma = avx && has_bit(words.leaf1_ecx, 12);
    features.f16c = avx && has_bit(words.leaf1_ecx, 29);
    features.avx_vnni = avx && has_bit(words.leaf7_1_eax, 4);
    features.avx512f = avx512f;
    features.avx512dq = avx512f && has_bit(words.leaf7_ebx, 17);
    features.avx512bw = avx512f && has_bit(words.leaf7_ebx, 30);
    features.avx512vl = avx512f && has_bit(words.leaf7_ebx, 31);
    features.avx512_vnni = avx512f && has_bit(words.leaf7_ecx, 11);
    features.avx512_bf16 = avx512f && has_bit(words.leaf7_1_eax, 5);
    features.amx_tile = tile;
    features.amx_bf16 = tile && has_bit(words.leaf7_edx, 22);
    features.amx_int8 = tile && has_bit(words.leaf7_edx, 25);
    return features;
}

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = decode_cpu_features(read_cpuid_words());
    return features;
}

bool can_use(InstructionSet instruction_set, const CpuFeatures& features) {
    const bool avx2 = features.avx2 && features.fma && features.f16c;
    const bool avx512 = avx2 && features.avx512f && features.avx512bw && features.avx512vl && features.avx512dq;
    const bool avx512_bf16 = avx512 && features.avx512_bf16 && features.avx512_vnni;
    switch (instruction_set) {
        case InstructionSet::kAmx:
            return avx512_bf16 && features.amx_tile && features.amx_bf16 && features.amx_int8;
        case InstructionSet::kAvx512Bf16:
            return avx512_bf16;
        case InstructionSet::kAvx512:
            return avx512;
        case InstructionSet::kAvx2Vnni:
            return avx2 && features.avx_vnni;
        case InstructionSet::kAvx2:
            return avx2;
        case InstructionSet::kPortable:
            break;
    }
    return true;
}

InstructionSet best_instruction_set(const CpuFeatures& features) {
    for (const InstructionSet set : {InstructionSet::kAmx, InstructionSet::kAvx512Bf16, InstructionSet::kAvx512,
                                     InstructionSet::kAvx2Vnni, InstructionSet::kAvx2}) {
        if (can_use(set, features)) return set;
    }
    return InstructionSet::kPortable;
}

const char* name_of(InstructionSet instruction_set) {
    switch (instruction_set) {
        case InstructionSet::kAmx:
            return "amx";
        case InstructionSet::kAvx512Bf16:
            return "avx512_bf16";
        case InstructionSet::kAvx512:
            return "avx512";
        case InstructionSet::kAvx2Vnni:
            return "avx2_vnni";
        case InstructionSet::kAvx2:
            return "avx2";
        case InstructionSet::kPortable:
            break;
    }
    return "portable";
}

}  // namespace quire
