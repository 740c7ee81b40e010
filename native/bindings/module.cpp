// quire._native: the Python module of the compiled core. It only converts; native/src, which does not
// know Python, computes.
#include "bindings.h"
#include "quire/cpu_features.h"
#include "quire/crc32.h"

namespace nb = nanobind;

namespace {

nb::dict cpu_features() {
    const quire::CpuFeatures& features = quire::cpu_features();
    nb::dict result;
    result["pclmulqdq"] = features.pclmulqdq;
    result["avx2"] = features.avx2;
    result["fma"] = features.fma;
    result["f16c"] = features.f16c;
    result["avx_vnni"] = features.avx_vnni;
    result["avx512f"] = features.avx512f;
    result["avx512bw"] = features.avx512bw;
    result["avx512vl"] = features.avx512vl;
    result["avx512dq"] = features.avx512dq;
    result["avx512_bf16"] = features.avx512_bf16;
    result["avx512_vnni"] = features.avx512_vnni;
    result["amx_tile"] = features.amx_tile;
    result["amx_bf16"] = features.amx_bf16;
    result["amx_int8"] = features.amx_int8;
    return result;
}

const char* instruction_set() { return quire::name_of(quire::best_instruction_set(quire::cpu_features())); }

std::uint32_t crc32(nb::handle data, std::uint32_t before) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    std::uint32_t found = 0;
    {
        const nb::gil_scoped_release release;
        found = quire::crc32(view.buf, static_cast<std::size_t>(view.len), before);
    }
    PyBuffer_Release(&view);
    return found;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The compiled core of quire.";
    module.def("cpu_features", &cpu_features, "What the processor and the operating system let a kernel use, by name.");
    module.def("instruction_set", &instruction_set,
               "The best form of the kernels here: portable, avx2, avx2_vnni, avx512, avx512_bf16 or amx.");
    module.def("crc32", &crc32, nb::arg("data"), nb::arg("before") = 0,
               "The checksum of bytes that zlib.crc32 gives, behind bytes whose checksum is `before`.");
    quire::bindings::bind_decoder(module);
    quire::bindings::bind_row_product(module);
    quire::bindings::bind_sampler(module);
}
