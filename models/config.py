"""The shape of a Llama-family decoder, with the field names of Hugging Face."""

import dataclasses

from kivi_jax.models.rope import RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers assumes for a key that a config.json leaves out, where the architectures differ.
_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}

# Keys that change the result of a model and that this decoder does not have, with the values that mean "unused".
_UNSUPPORTED = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "partial_rotary_factor": (1, 1.0),
    "num_local_experts": (0, 1),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Hashable description of a decoder: what `Llama` is built from and carries.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: as in Hugging Face.
        num_key_value_heads: heads of keys and values; None: as many as query heads.
        head_dim: channels of a head; None: `hidden_size / num_attention_heads`.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are scaled; a dict as in config.json is taken too.
        max_position_embeddings: the context the checkpoint was made for. Only "dynamic" scaling computes with it.
        tie_word_embeddings: whether the embedding is the output head as well.
        attention_bias: whether q_proj, k_proj and v_proj have biases.
        attention_out_bias: whether o_proj has one (Llama with `attention_bias`; not Qwen2).
        mlp_bias: whether gate_proj, up_proj and down_proj have biases.
        qk_norm: whether queries and keys are normalized head by head before the rotation (Qwen3).
        sliding_window: how many tokens, itself included, a query sees in the layers that slide; None: no layer slides.
        layer_types: "full_attention" or "sliding_attention" for each layer; None: all of them slide if
            `sliding_window` is given.
        initializer_range: standard deviation of freshly made weights.
        bos_token_id, pad_token_id: None where the checkpoint has none.
        eos_token_id: every id that ends a text; an int is taken too.

    Raises:
        ValueError: sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        _check_counts(
            self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        )
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size must be divisible by num_attention_heads where head_dim is not given; "
                f"got {self.hidden_size} and {heads}."
            )
        scaling = self.rope_scaling
        normalized = {
            "num_key_value_heads": heads if self.num_key_value_heads is None else self.num_key_value_heads,
            "head_dim": self.hidden_size // heads if self.head_dim is None else self.head_dim,
            "rope_scaling": RopeScaling.from_dict(scaling) if isinstance(scaling, dict) else scaling,
            "layer_types": None if self.layer_types is None else tuple(self.layer_types),
            "eos_token_id": _ids(self.eos_token_id),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self):
        _check_counts(self, "num_key_value_heads", "head_dim", "max_position_embeddings")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads; "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, as channels are rotated in pairs; got {self.head_dim}.")
        if self.sliding_window is not None:
            _check_counts(self, "sliding_window")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be greater than 0; got {self.rope_theta!r}.")
        factors = self.rope_scaling.frequency_factors if self.rope_scaling else None
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ValueError(f"frequency_factors must have {self.head_dim // 2} numbers; got {len(factors)}.")
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name each of the {self.num_hidden_layers} layers; got {len(self.layer_types)}."
            )
        if unknown := set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(f"layer_types must be {FULL} or {SLIDING}; got {min(unknown)!r}, which is not supported.")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError("sliding_window must be given where layer_types has a sliding layer; got None.")

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, itself included; None: all before it."""
        slides = self.layer_types is None or self.layer_types[layer] == SLIDING
        return self.sliding_window if slides else None

    def to_dict(self) -> dict:
        """The fields in a form that JSON can hold."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["eos_token_id"] = list(self.eos_token_id)
        fields["layer_types"] = None if self.layer_types is None else list(self.layer_types)
        fields["rope_scaling"] = None if self.rope_scaling is None else self.rope_scaling.to_dict()
        return fields

    @classmethod
    def from_dict(cls, fields: dict) -> "LlamaConfig":
        """The config that `to_dict` described."""
        return cls(**fields)

    @classmethod
    def from_hf(cls, fields: dict) -> "LlamaConfig":
        """Reads the contents of a Hugging Face config.json, of the form before and after transformers 5.

        Args:
            fields: the parsed JSON.

        Raises:
            ValueError: another architecture, a missing size, or a setting that changes results and is not supported.
        """
        kind = _model_type(fields)
        for key, unused in _UNSUPPORTED.items():
            if (value := fields.get(key)) is not None and value not in unused:
                allowed = f"one of {', '.join(map(repr, unused))}" if unused else "absent"
                raise ValueError(
                    f"config.json's {key} must be {allowed} for a {kind} model; got {value!r}, unsupported."
                )
        given = _DEFAULTS[kind] | fields

        def size(name):
            if given.get(name) is None:
                raise ValueError(f"config.json must give {name}; it does not.")
            return given[name]

        max_positions = size("max_position_embeddings")
        theta, scaling = _rope(fields, max_positions)
        window, layer_types = _windows(kind, given, size("num_hidden_layers"))
        bias = fields.get("attention_bias")
        if bias is not None and kind in ("mistral", "qwen2") and bias != (kind == "qwen2"):
            raise ValueError(f"config.json's attention_bias must be {kind == 'qwen2'} for a {kind} model; got {bias}.")
        return cls(
            vocab_size=size("vocab_size"),
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=size("num_attention_heads"),
            num_key_value_heads=given.get("num_key_value_heads"),
            head_dim=given.get("head_dim"),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=kind == "qwen2" or bool(bias),
            attention_out_bias=kind in ("llama", "qwen3") and bool(bias),
            mlp_bias=kind == "llama" and bool(fields.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            sliding_window=window,
            layer_types=layer_types,
            initializer_range=fields.get("initializer_range", 0.02),
            bos_token_id=given.get("bos_token_id"),
            eos_token_id=given.get("eos_token_id"),
            pad_token_id=fields.get("pad_token_id"),
        )


def _check_counts(config: LlamaConfig, *names: str):
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}.")


def _ids(ids) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _model_type(fields: dict) -> str:
    kind, names = fields.get("model_type"), fields.get("architectures") or []
    supported = ", ".join(ARCHITECTURES.values())
    if kind not in ARCHITECTURES:
        found = names[0] if names else kind
        raise ValueError(f"The model must be one of {supported}; got {found!r}, which is not supported.")
    if names and ARCHITECTURES[kind] not in names:
        raise ValueError(f"A {kind} checkpoint must hold a {ARCHITECTURES[kind]}; got {names[0]!r}, not supported.")
    return kind


def _rope(fields: dict, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`."""
    scaling = dict(fields.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            "config.json's rope_parameters must be the same for all layers; got one set for each layer type."
        )
    for key, value in (("rope_theta", fields.get("rope_theta")), *(fields.get("rope_scaling") or {}).items()):
        if value is not None and scaling.setdefault(key, value) != value:
            raise ValueError(
                f"config.json must give {key} once, or twice the same; got {scaling[key]!r} and {value!r}."
            )
    theta = scaling.pop("rope_theta", 10000.0)
    if (partial := scaling.pop("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"rope_parameters' partial_rotary_factor must be 1; got {partial!r}, which is not supported.")
    kind, original = scaling.get("rope_type") or scaling.get("type"), scaling.get("original_max_position_embeddings")
    if kind == "dynamic" and original == max_positions:
        del scaling["original_max_position_embeddings"]
    if kind == "yarn":
        original = scaling.setdefault("original_max_position_embeddings", max_positions)
        scaling.setdefault("factor", max_positions / original)
    return float(theta), RopeScaling.from_dict(scaling)


def _windows(kind: str, given: dict, num_layers: int) -> tuple[int | None, tuple[str, ...] | None]:
    """The sliding window and which layers have it, by the rules of each architecture in transformers."""
    window, layer_types = given.get("sliding_window"), given.get("layer_types")
    if kind == "llama" and (window is not None or SLIDING in (layer_types or ())):
        raise ValueError(
            f"config.json's sliding_window must be absent for a llama model; got {window!r}, not supported."
        )
    if kind in ("qwen2", "qwen3"):
        window = window if given.get("use_sliding_window") else None
        if layer_types is None and window is not None:
            first = given.get("max_window_layers", 28)
            layer_types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if window is None and SLIDING not in (layer_types or ()):
        layer_types = None
    return window, None if layer_types is None else tuple(layer_types)
