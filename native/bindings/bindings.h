// Helpers for the files of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "quire/decoder.h"

namespace quire::bindings {

namespace nb = nanobind;

template <typename T, int kDimensions>
using Array = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

inline KvType kv_type_of(const std::string& name) {
    if (name == "float32") return KvType::kFloat32;
    if (name == "bfloat16") return KvType::kBfloat16;
    if (name == "int8") return KvType::kInt8;
    if (name == "k8v4") return KvType::kK8V4;
    if (name == "int4") return KvType::kInt4;
    throw std::invalid_argument("keys and values cannot be stored as " + name);
}

// Returns whether arrays [num_blocks, block_size, num_kv_heads, elements] have the bytes of these keys and values;
// values that are part of their keys have none.
template <typename Blocks>
bool fits(const PagedKv& kv, const Blocks& keys, const Blocks& values) {
    return kv.block_size % kPanelWidth == 0 && keys.shape(0) == values.shape(0) && keys.shape(1) == values.shape(1) &&
           keys.shape(2) == values.shape(2) && static_cast<int>(keys.shape(2)) == kv.num_kv_heads &&
           keys.shape(3) * keys.itemsize() == kv.key_bytes() &&
           values.shape(3) * values.itemsize() == (kv.latent_dim > 0 ? 0 : kv.value_bytes());
}

DecoderShape shape_of(const nb::dict& fields);
Activation activation_of(const std::string& name);
void bind_decoder(nb::module_& module);
void bind_row_product(nb::module_& module);
void bind_sampler(nb::module_& module);

}  // namespace quire::bindings
