// Segments in Python: what each file of instructions adds to them, and their runs.

#include <nanobind/stl/map.h>

#include "segment_run.h"

namespace quire {

void bind_segments(nb::module_& m) {
    m.def("measure_segments", &measure_segments, nb::arg("measures"));
    m.def("segment_seconds", &segment_seconds);
    SegmentClass segment(m, "Segment");
    segment
        .def(nb::init<>())
        .def("given", [](Segment& s, int64_t width, bool integers) { return s.body->given(width, integers); },
             nb::arg("width"), nb::arg("integers") = false)
        .def("value", [](Segment& s, int64_t width, bool integers) { return s.body->value(width, integers); },
             nb::arg("width"), nb::arg("integers") = false)
        .def("constant", [](Segment& s, const array& whole) { return s.body->constant(whole); })
        .def("output", [](Segment& s, int value, const std::vector<int>& shape) { s.body->output(value, shape); })
        .def("leave_out_by", [](Segment& s, int tokens) { s.body->leave_out_by(tokens); })
        .def("finish", [](Segment& s) { s.body->finish(); })
        .def("run", &Segment::run, nb::arg("given"), nb::arg("tables") = std::vector<TableArrays>(),
             nb::arg("keys") = nb::none(), nb::arg("pools") = nb::list(), nb::arg("states") = nb::list(),
             nb::arg("state_rows") = std::vector<array>(), nb::arg("at_once") = true);
    bind_segment_attention(segment);
    bind_segment_elements(segment);
    bind_segment_products(segment);
    bind_segment_rows(segment);
    bind_segment_states(segment);
    bind_segment_tables(segment);
}

}  // namespace quire
