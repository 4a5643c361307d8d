"""The graph of a decoder without experts, as its ModelSpec describes it, with weights outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from w4conv import __version__
from w4conv.errors import InputError
from w4conv.exports.plan import Output
from w4conv.models.spec import ModelSpec

IR_VERSION: Final = 10
OPSETS: Final = {"": 17, "com.microsoft": 1}
TYPES: Final = {
    "U8": TensorProto.UINT8, "F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
}  # fmt: skip
MICROSOFT: Final = "com.microsoft"
EXACT: Final = 1  # accuracy_level: products of float32


def decoder_graph(
    spec: ModelSpec, outputs: Sequence[Output], offsets: Mapping[str, int], coded: Mapping[str, int], data: str
) -> bytes:
    """model.onnx. outputs: the tensors in the file `data`, at `offsets`. coded: block size of those in MatMulNBits."""
    return _Decoder(spec, outputs, offsets, coded, data).serialized()


class _Decoder:
    """Values are named after what makes them: "model.layers.0.self_attn.q_proj"."""

    def __init__(
        self,
        spec: ModelSpec,
        outputs: Sequence[Output],
        offsets: Mapping[str, int],
        coded: Mapping[str, int],
        data: str,
    ) -> None:
        self._spec = spec
        self._stored = {output.name: output for output in outputs}
        self._offsets = offsets
        self._coded = coded
        self._data = data
        self._nodes: list[NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total_sequence"]),
        ]
        self._outputs: list[ValueInfoProto] = []

    def serialized(self) -> bytes:
        spec = self._spec
        self._lengths()
        x = self._scaled(self._embedding(), "embedding_scale", "embedded")
        for layer in range(spec.n_layers):
            x = self._layer(layer, x)
        self._head(self._norm("model.norm", x))
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", spec.vocab_size])
        graph: GraphProto = helper.make_graph(
            self._nodes, spec.architecture, self._inputs, [logits, *self._outputs], list(self._initializers.values())
        )
        model: ModelProto = helper.make_model(
            graph,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in OPSETS.items()],
            producer_name="w4conv",
            producer_version=__version__,
        )
        out: bytes = model.SerializeToString(deterministic=True)
        return out

    def _node(self, op: str, inputs: Sequence[str], out: str, *more: str, domain: str = "", **attributes: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs, [out, *more], name=f"{out}/{op}", domain=domain, **attributes))
        return out

    def _weight(self, name: str, *, shape: Sequence[int] | None = None, alias: str | None = None) -> str:
        """The initializer `alias`, by default `name`: the tensor `name` of the data file, seen in another shape."""
        known, output = alias or name, self._stored[name]
        if known not in self._initializers:
            tensor = TensorProto(name=known, data_type=TYPES[output.dtype], dims=shape or output.shape)
            tensor.data_location = TensorProto.EXTERNAL
            places = {"location": self._data, "offset": self._offsets[name], "length": output.nbytes}
            for key, value in places.items():
                tensor.external_data.add(key=key, value=str(value))
            self._initializers[known] = tensor
        return known

    def _constant(self, name: str, values: Sequence[int]) -> str:
        self._initializers[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def _number(self, name: str, value: float) -> str:
        self._initializers[name] = helper.make_tensor(name, TensorProto.FLOAT, [], [value])
        return name

    def _lengths(self) -> None:
        """seqlens_k, one less than the tokens of each text, and total_length, of the longest."""
        one, second = self._constant("one", [1]), self._constant("second", [1])
        total = self._node("ReduceSum", ["attention_mask", one], "tokens", keepdims=0)
        self._node("Cast", [self._node("Sub", [total, one], "last")], "seqlens_k", to=TensorProto.INT32)
        shape = self._node("Shape", ["attention_mask"], "mask_shape")
        width = self._node("Gather", [shape, second], "width", axis=0)
        scalar = self._node("Squeeze", [width], "total")
        self._node("Cast", [scalar], "total_length", to=TensorProto.INT32)

    def _embedding(self) -> str:
        name, out = "model.embed_tokens.weight", "model.embed_tokens"
        stored = self._stored[name]
        if name not in self._coded:
            rows = self._node("Gather", [self._weight(name), "input_ids"], out + ".rows", axis=0)
            return self._node("Cast", [rows], out, to=TensorProto.FLOAT)
        flat = (stored.shape[0], stored.shape[1] * stored.shape[2])
        inputs = [self._weight(name, shape=flat), "input_ids", self._weight(f"{out}.scales")]
        if f"{out}.zero_points" in self._stored:
            inputs.append(self._weight(f"{out}.zero_points"))
        return self._node(
            "GatherBlockQuantized", inputs, out, domain=MICROSOFT, bits=self._bits(name), block_size=self._coded[name],
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def _bits(self, name: str) -> int:
        return 8 * self._stored[name].shape[2] // self._coded[name]

    def _layer(self, layer: int, x: str) -> str:
        prefix = f"model.layers.{layer}"
        normed = self._placed_norm(layer, "attention_norm", x)
        x = self._branch(layer, "attention_out_norm", x, self._attention(layer, normed), f"{prefix}.attended")
        normed = self._placed_norm(layer, "mlp_norm", x)
        return self._branch(layer, "mlp_out_norm", x, self._feed_forward(f"{prefix}.mlp", normed), prefix)

    def _branch(self, layer: int, norm: str, x: str, branch: str, out: str) -> str:
        normed = self._placed_norm(layer, norm, branch)
        return self._node("Add", [x, self._scaled(normed, "residual_scale", f"{out}.scaled")], out)

    def _placed_norm(self, layer: int, place: str, x: str) -> str:
        norms = self._spec.norms
        return self._norm(f"model.layers.{layer}.{norms[place]}", x) if place in norms else x

    def _attention(self, layer: int, normed: str) -> str:
        spec, module = self._spec, f"model.layers.{layer}.self_attn"
        q, k, v = self._queries(module, normed)
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        for kind in ("key", "value"):
            self._inputs.append(self._cache(f"{past}.{kind}", "past_sequence"))
            self._outputs.append(self._cache(f"{present}.{kind}", "total_sequence"))
        rope = spec.rope_index(layer)
        caches = [] if rope < 0 else [self._weight(f"{part}_cache{'_local' * rope}") for part in ("cos", "sin")]
        mixed = self._node(
            "GroupQueryAttention",
            [q, k, v, f"{past}.key", f"{past}.value", "seqlens_k", "total_length", *caches],
            module,
            f"{present}.key",
            f"{present}.value",
            domain=MICROSOFT,
            num_heads=spec.n_heads,
            kv_num_heads=spec.n_kv_heads,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            softcap=spec.attention_softcap,
            do_rotary=int(rope >= 0),
            local_window_size=spec.window(layer) or -1,
        )
        return self._linear(f"{module}.o_proj", mixed)

    def _queries(self, module: str, normed: str) -> list[str]:
        """Queries, keys and values, normed where the family does so."""
        spec = self._spec
        widths = [n * spec.head_dim for n in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
        names = [f"{module}.{part}_proj" for part in "qkv"]
        if "qkv" in spec.fused:
            self._split(self._linear(f"{module}.qkv_proj", normed), names, widths)
        else:
            names = [self._linear(name, normed) for name in names]
        for i, part in enumerate("qk") if spec.qk_norm else ():
            x, norm = names[i], f"{module}.{part}_norm"
            if spec.qk_norm == "row":
                names[i] = self._norm(norm, x)
                continue
            heads = self._node("Reshape", [x, self._constant("heads", [0, -1, spec.head_dim])], f"{norm}.heads")
            whole = self._constant(f"{part}_row", [0, -1, widths[i]])
            names[i] = self._node("Reshape", [self._norm(norm, heads), whole], f"{norm}.rows")
        return names

    def _feed_forward(self, module: str, normed: str) -> str:
        spec = self._spec
        gate, up = f"{module}.gate_proj", f"{module}.up_proj"
        if "gate_up" in spec.fused:
            self._split(self._linear(f"{module}.gate_up_proj", normed), [gate, up], [spec.intermediate_size] * 2)
        else:
            gate, up = self._linear(gate, normed), self._linear(up, normed)
        if spec.activation == "silu":
            sigmoid = self._node("Sigmoid", [gate], f"{module}.sigmoid")
            activated = self._node("Mul", [gate, sigmoid], f"{module}.silu")
        elif spec.activation == "gelu_tanh":
            activated = self._node("FastGelu", [gate], f"{module}.gelu", domain=MICROSOFT)
        else:
            raise InputError(
                f"the activation {spec.activation} of {spec.architecture} has no nodes in ONNX here. Export to another "
                "format"
            )
        gated = self._node("Mul", [activated, up], f"{module}.gated")
        return self._linear(f"{module}.down_proj", gated)

    def _split(self, x: str, names: list[str], widths: Sequence[int]) -> None:
        self._node("Split", [x, self._constant(f"{names[0]}.widths", widths)], names[0], *names[1:], axis=-1)

    def _scaled(self, x: str, setting: str, out: str) -> str:
        """x times a number of the spec, which is often 1."""
        factor = getattr(self._spec, setting)
        return x if factor == 1 else self._node("Mul", [x, self._number(setting, factor)], out)

    def _head(self, x: str) -> str:
        spec = self._spec
        steps = [("Div", spec.logits_divisor, 1.0)]
        if spec.final_softcap:
            steps += [("Div", spec.final_softcap, 0.0), ("Tanh", 0.0, 1.0), ("Mul", spec.final_softcap, 0.0)]
        steps = [step for step in steps if step[1] != step[2]]
        x = self._linear("lm_head", x, tied=spec.tied_head, out="logits" if not steps else None)
        for i, (op, number, _) in enumerate(steps):
            inputs = [x, self._number(f"logits_{op}_{number:g}", number)] if number else [x]
            x = self._node(op, inputs, "logits" if i + 1 == len(steps) else f"logits.{i}")
        return x

    def _cache(self, name: str, length: str) -> ValueInfoProto:
        dims: list[str | int | None] = ["batch", self._spec.n_kv_heads, length, self._spec.head_dim]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    def _norm(self, module: str, x: str) -> str:
        scale = self._weight(f"{module}.weight")
        if offset := self._spec.norm_offset:  # stored without it
            scale = self._node("Add", [scale, self._number("norm_offset", offset)], f"{module}.scale")
        return self._node(
            "SimplifiedLayerNormalization", [x, scale], module, axis=-1, epsilon=self._spec.norm_eps, stash_type=1
        )

    def _linear(self, module: str, x: str, *, tied: bool = False, out: str | None = None) -> str:
        """module: of the weights; of a tied head they are the embedding's."""
        owner = "model.embed_tokens" if tied else module
        name, bias = f"{owner}.weight", f"{module}.bias"
        out = out or module
        product = out if bias not in self._stored else f"{out}.product"
        stored = self._stored[name]
        alias = f"{module}.weight" if tied else None
        if name in self._coded:
            block = self._coded[name]
            inputs = [x, self._weight(name, alias=alias), self._weight(f"{owner}.scales")]
            if f"{owner}.zero_points" in self._stored:
                inputs.append(self._weight(f"{owner}.zero_points"))
            n_columns = self._spec_columns(name)
            self._node(
                "MatMulNBits", inputs, product, domain=MICROSOFT, K=n_columns, N=stored.shape[0],
                bits=self._bits(name), block_size=block, accuracy_level=EXACT,
            )  # fmt: skip
        else:
            plain = self._node("Cast", [self._weight(name)], f"{module}.float", to=TensorProto.FLOAT)
            turned = self._node("Transpose", [plain], f"{module}.turned", perm=[1, 0])
            self._node("MatMul", [x, turned], product)
        return product if product == out else self._node("Add", [product, self._weight(bias)], out)

    def _spec_columns(self, name: str) -> int:
        return next(tensor.shape[1] for tensor in self._spec.tensors() if tensor.name == name)
