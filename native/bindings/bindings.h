// Shared by the files of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace quire::bindings {

namespace nb = nanobind;

template <typename T, int kDimensions>
using Array = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

void bind_decoder(nb::module_& module);
void bind_sampler(nb::module_& module);

}  // namespace quire::bindings
