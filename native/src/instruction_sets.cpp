#include "quire/decoder.h"

namespace quire {

namespace portable {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx2_vnni {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512_bf16 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
#endif

const Kernels& kernels_for(InstructionSet instruction_set) {
#if defined(__x86_64__)
    switch (instruction_set) {
        case InstructionSet::kAmx:
            return amx::kernels();
        case InstructionSet::kAvx512Bf16:
            return avx512_bf16::kernels();
        case InstructionSet::kAvx512:
            return avx512::kernels();
        case InstructionSet::kAvx2Vnni:
            return avx2_vnni::kernels();
        case InstructionSet::kAvx2:
            return avx2::kernels();
        case InstructionSet::kPortable:
            break;
    }
#endif
    static_cast<void>(instruction_set);
    return portable::kernels();
}

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> result;
    for (const InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx2Vnni,
                                     InstructionSet::kAvx512, InstructionSet::kAvx512Bf16, InstructionSet::kAmx}) {
        const Kernels& kernels = kernels_for(set);
        if (can_use(set, cpu_features()) && (result.empty() || result.back() != &kernels)) result.push_back(&kernels);
    }
    return result;
}

}  // namespace quire
