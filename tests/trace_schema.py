"""What `trace --json` writes, as a JSON schema; the page of `trace --html` shows nothing else."""


def thing(optional=(), **properties):
    required = [key for key in properties if key not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def many(items, least=1, most=None):
    return {"type": "array", "items": items, "minItems": least} | ({"maxItems": most} if most else {})


TEXT, YES, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
SIZE = {"type": "number", "minimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1.001}  # a sum of many rounds
SHAPE = many({"type": "integer", "minimum": 1}, 2)
TWO = many(NUMBER, 2, 2)
VECTOR = {"first": many(NUMBER, 1, 4), "norm": SIZE, "rms": SIZE}
ADDED = {"attention_added": SIZE, "mlp_added": SIZE}
STAGES = ["prompt", "embedding", "layers", "one_layer", "logits", "decode", "sampling", "checks"]

TRACE = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | thing(
    model=TEXT,
    dtype={"enum": ["float32", "bfloat16", "float16"]},
    device=TEXT,
    where=thing(**dict.fromkeys(STAGES, TEXT)),
    prompt=thing(
        text={"type": ["string", "null"]},
        tokens=many(thing(position=COUNT, id=COUNT, piece=TEXT, text=TEXT, bytes=COUNT)),
    ),
    embedding=thing(matrix=SHAPE, shape=SHAPE, positions=many(thing(position=COUNT, **VECTOR), 1, 3)),
    layers=many(thing(layer=COUNT, shape=SHAPE, **VECTOR, **ADDED)),
    one_layer=thing(
        layer=COUNT,
        projections=many(thing(name=TEXT, weight=SHAPE, bias=YES, out=SHAPE, **{"in": SHAPE}), 7, 7),
        query_heads=COUNT,
        kv_heads=COUNT,
        queries_per_kv_head=COUNT,
        head_dim=COUNT,
        first_head=many(
            thing(
                optional=["normed"],
                kind={"enum": ["q", "k"]},
                **{stage: thing(**VECTOR) for stage in ("projected", "normed", "turned")},
                pair=thing(of=many(COUNT, 2, 2), before=TWO, after=TWO),
            ),
            2,
            2,
        ),
        scores=SHAPE,
        looks=many(
            thing(head=COUNT, kv_head=COUNT, at=many(thing(position=COUNT, token=TEXT, weight=SHARE), 1, 3)),
        ),
        mix_shape=SHAPE,
        **{name: thing(**VECTOR) for name in ("value", "mix", "gate", "gate_up", "down")},
    ),
    logits=thing(
        shape=SHAPE,
        final_norm=thing(**VECTOR),
        largest=NUMBER,
        smallest=NUMBER,
        top=many(thing(token_id=COUNT, token=TEXT, logit=NUMBER, prob=SHARE), 5, 5),
    ),
    decode=thing(
        steps=many(
            thing(
                forward={"enum": ["prompt", "token"]},
                input=SHAPE,
                fed=TEXT,
                seconds=SIZE,
                before=COUNT,
                after=COUNT,
                cache=SHAPE,
                token_id=COUNT,
                token=TEXT,
                bytes=COUNT,
                prob=SHARE,
            )
        ),
        ended=YES,
        formula=TEXT,
        context_length=COUNT,
        bytes_per_token=COUNT,
        bytes_at_full_context=COUNT,
        bytes_per_token_if_every_head_had_its_own=COUNT,
    ),
    sampling=many(
        thing(way=TEXT, candidates=COUNT, probability_kept=SHARE, top=many(thing(token=TEXT, prob=SHARE), 5, 5)), 9, 9
    ),
    checks=thing(
        optional=["equal_to_reference"],
        with_cache_s=SIZE,
        without_cache_s=SIZE,
        equal_without_cache=YES,
        equal_to_complete=YES,
        equal_to_reference=YES,
    ),
    maps=thing(
        positions=many(COUNT),
        layers=many(
            thing(
                optional=["attention_added", "mlp_added"],
                layer={"type": ["integer", "null"]},
                stream=many(SIZE),
                attention_added=many(SIZE),
                mlp_added=many(SIZE),
                says=many(thing(token_id=COUNT, token=TEXT, prob=SHARE)),
            ),
            2,
        ),
        attention=many(many(many(many(SHARE)))),
    ),
)
