"""Records attention, from the products of a layer's rows to its output."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.specs import KVLayout
from quire.device.cuda.row_layout import RowLayout
from quire.executor.graphs.attention import attention_kernels
from quire.executor.graphs.attention.indexers import IndexerRecording
from quire.executor.graphs.attention.layer_attention import LayerAttention, Rotation
from quire.executor.graphs.attention.pools import TailCoding
from quire.executor.graphs.operands import HeadOperand, UnsupportedNode, check_heads
from quire.executor.graphs.places import NodeKinds, Operand
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.rows.row_layouts import LayoutRecording
from quire.program.values import Node, Program


class AttentionRecording(IndexerRecording, LayoutRecording):
    """Records attention over the keys and values of pools.

    Attributes:
        _layout: says which layer owns the keys that a layer reads.
        _prepared: queries that their products have rotated, by the attention that reads them.
    """

    _layout: KVLayout
    _prepared: dict[Node, Buffer]

    @property
    def kinds(self) -> NodeKinds:
        return {**super().kinds, "attention": self._attention}

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self._tails: dict[TailCoding, list[tuple[int, ...]]] = {}
        """Addresses of the arrays of layers whose tails may fill, by their coding."""

    def _attention(self, node: Node) -> None:
        attend, recorder = node.arguments[-1], self._recorder
        own = attend.attributes
        chosen = self._chosen_by(own.get("chosen_by"))
        sinks = attend.weight("sinks")
        if "sinks" in attend.roles or (sinks is not None and sinks.dtype != mx.bfloat16):
            raise UnsupportedNode("attention with sinks that are no weights in bfloat16")
        if (dtype := self._program.values[attend.outputs[0]].dtype) != mx.bfloat16:
            raise UnsupportedNode(f"attention of {dtype}")
        layer = own["layer"]
        spec = self._layout.groups[self._layout.group[layer]].spec.attention
        assert spec is not None, "layers that attend keep keys"
        inner = self._program.inside(node)
        roles = ("q", "k") if spec.value_in_key else ("q", "k", "v")
        heads = {role: HeadOperand.of(inner, attend, role) for role in roles}
        q, k, v = heads["q"], heads["k"], heads.get("v")
        assert q is not None, "attention has queries"
        prepared = self._prepared.get(node)
        if not paged.takes(spec.head_dim, spec.value_dim):
            raise UnsupportedNode(f"heads of {spec.head_dim}, with values of {spec.value_dim}")
        check_heads(q, k, v)
        eps = {h.norm.attributes["eps"] for h in heads.values() if h and h.norm is not None}
        rotation = self._rotation(q, k)
        values = [each.part.source for each in heads.values() if each is not None]
        reads = self._read([*values, *(q.rotate.inputs[1:] if q.rotate is not None else ())])
        pool, output = self._pools[self._layout.owner[layer]], attend.outputs[0]
        written = [RowLayout.DIGITS] if pool.writes_digits(spec.value_dim) else []
        result = self._written(output, reads, layout=self._wanted_layout(output, written))
        described = LayerAttention(
            self._width(attend.input("q"), 1),
            spec,
            own["scale"],
            softcap=own.get("softcap"),
            q=self._head_rows(q),
            k=None if k is None or prepared else self._head_rows(k),
            v=None if v is None or prepared else self._head_rows(v),
            normed=q.norm is not None,
            values_normed=v is not None and v.norm is not None,
            eps=max(eps, default=0.0),
            q_norm=None if q.norm is None else q.norm.weight("weight"),
            k_norm=None if k is None or k.norm is None else k.norm.weight("weight"),
            rotation=rotation,
            result=result,
            digits=self._laid_out.get((output, RowLayout.DIGITS), 0),
            sinks=sinks,
            chosen=chosen,
            prepared=prepared,
        )
        pool.record(recorder, described)
        self._has_attended(own.get("chosen_by"))
        coding = None if k is None else pool.tail_coding(spec)
        if coding is not None:
            self._tails.setdefault(coding, []).append(pool.arrays)

    def _head_rows(self, heads: HeadOperand) -> Operand:
        part, place = heads.part, self._place(heads.part.source)
        if place.buffer is None:
            raise UnsupportedNode("attention over heads that no kernel computes")
        at = place.address + mx.bfloat16.size * part.offset
        return Operand(at, mx.bfloat16, part.row, head=part.head, buffer=place.buffer)

    def _rotation(self, q: HeadOperand, k: HeadOperand | None) -> Rotation | None:
        if q.rotate is None:
            return None
        cosines, sines = q.rotate.inputs[1:]
        if k is not None and k.rotate is not None and k.rotate.inputs[1:] != (cosines, sines):
            raise UnsupportedNode("attention with two rotations")
        places = [self._place(each).buffer for each in (cosines, sines)]
        if places[0] is None or places[1] is None:
            raise UnsupportedNode("a rotation by constant angles")
        pairs = self._width(cosines, 1)
        return Rotation(places[0], places[1], pairs, neighbours=q.rotate.attributes["neighbours"])

    def code_tails(self) -> None:
        """Record the kernels that code the blocks which the step's rows have filled."""
        recorder = self._recorder
        for coding, stores in self._tails.items():
            group = recorder.inputs.group(coding.group)
            arguments = [recorder.inputs.rows, group.blocks, group.offsets, group.tails]
            dims = coding.kv_heads, coding.key_dim, coding.value_dim
            signs = packed.signs(coding.value_dim) if coding.value_dim else None
            arguments += [0 if signs is None else recorder.copied(signs)]
            arguments += [recorder.table([address for arrays in stores for address in arrays])]
            source = attention_kernels.code_tails(*dims, coding.codes)
            grid = coding.kv_heads, len(stores), 1
            recorder.add_last(source, grid, attention_kernels.TAIL_THREADS, arguments=arguments)
