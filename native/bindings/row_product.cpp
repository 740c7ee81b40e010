// quire._native.RowProduct: checks arrays once, and passes them on as raw pointers.
#include "quire/row_product.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "bindings.h"

namespace quire::bindings {
namespace {

using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bias = Array<const float, 1>;

void make(RowProduct* self, const Kernels& kernels, ThreadTeam& team, const Matrix& rows,
          const std::optional<Bias>& bias) {
    const bool half = rows.dtype() == nb::dtype<std::uint16_t>();
    if (!half && rows.dtype() != nb::dtype<float>()) {
        throw std::invalid_argument("an array of float32, or of uint16 that holds bfloat16, is wanted");
    }
    if (bias && bias->shape(0) != rows.shape(0)) throw std::invalid_argument("a bias has a number for each output");
    const MatrixRows from = {.data = rows.data(),
                             .type = half ? StoredType::kBfloat16 : StoredType::kFloat32,
                             .num_outputs = static_cast<int>(rows.shape(0)),
                             .num_inputs = static_cast<int>(rows.shape(1))};
    const float* numbers = bias ? bias->data() : nullptr;
    const nb::gil_scoped_release release;
    new (self) RowProduct(kernels, team, from, numbers);
}

void run(const RowProduct& product, const Array<const float, 2>& rows, const Array<float, 2>& output,
         const std::string& activation) {
    const int num_rows = static_cast<int>(rows.shape(0)), stride = static_cast<int>(output.shape(1));
    if (static_cast<int>(rows.shape(1)) != product.num_inputs() || output.shape(0) != rows.shape(0) ||
        stride != product.output_stride()) {
        throw std::invalid_argument("the rows do not have the shape of the matrix");
    }
    std::optional<Activation> named;
    if (!activation.empty()) named = activation_of(activation);
    const Rows input = {const_cast<float*>(rows.data()), product.num_inputs()};  // a product only reads its input
    const nb::gil_scoped_release release;
    product.run(input, num_rows, {output.data(), stride}, named);
}

void activate(const Kernels& kernels, const Array<float, 1>& numbers, const std::string& activation) {
    if (numbers.shape(0) % kPanelWidth) throw std::invalid_argument("a multiple of the panel width is wanted");
    const Activation named = activation_of(activation);
    const nb::gil_scoped_release release;
    kernels.activate(numbers.data(), static_cast<int>(numbers.shape(0)), named);
}

}  // namespace

void bind_row_product(nb::module_& module) {
    module.def("activate", &activate, nb::arg("kernels"), nb::arg("numbers"), nb::arg("activation"),
               "Write the activation of each number in its place; their count is a multiple of the panel width.");
    nb::class_<RowProduct>(module, "RowProduct", "A matrix for rows; see native/include/quire/row_product.h.")
        .def("__init__", &make, nb::arg("kernels"), nb::arg("team"), nb::arg("rows"), nb::arg("bias").none(),
             nb::keep_alive<1, 3>())
        .def_prop_ro("output_stride", &RowProduct::output_stride)
        .def_prop_ro("num_bytes", &RowProduct::num_bytes)
        .def("run", &run, nb::arg("rows"), nb::arg("output"), nb::arg("activation") = "",
             "Write the activation of each row's product to `output`, whose rows have `output_stride` numbers.");
}

}  // namespace quire::bindings
