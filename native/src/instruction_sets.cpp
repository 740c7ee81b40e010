#include "quire/decoder.h"

namespace quire {

namespace portable {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
#endif

const Kernels& kernels_for(InstructionSet instruction_set) {
#if defined(__x86_64__)
    switch (instruction_set) {
        case InstructionSet::kAmx:
        case InstructionSet::kAvx512:
            return avx512::kernels();
        case InstructionSet::kAvx2:
            return avx2::kernels();
        case InstructionSet::kPortable:
            break;
    }
#endif
    static_cast<void>(instruction_set);
    return portable::kernels();
}

}  // namespace quire
