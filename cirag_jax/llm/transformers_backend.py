"""A backend for PyTorch models of ``transformers``, such as encoder-decoders (Flan-T5).

It is slower than the JAX engine, because a batch waits for its slowest row and prefixes are not
reused.
"""

import copy
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers

from cirag_jax.errors import UserError, check_choice
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import ChatTokenizer, Overflow, PromptError, fit_prompt, plain_text
from cirag_jax.llm.grammar import GrammarState, JsonGrammar
from cirag_jax.models.io.peft_format import tensor_file
from cirag_jax.models.io.pretrained_decoder import check_tokenizer, resolve_decoder
from cirag_jax.models.io.tensor_files import check_tensor, gguf_parts, open_tensors, weight_files

_UNBOUNDED = 1 << 30
_REPEATED = -1e20  # logit of a repeated n-gram; tokens that a grammar forbids get -inf

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class TransformersConfig:
    """Settings of `TransformersBackend`.

    Attributes:
      batch_size: number of conversations decoded together.
      dtype: float32, bfloat16 or float16. None means the checkpoint's type on a GPU, and float32
        on a CPU.
      device: device such as ``cuda``; None means a GPU if there is one.
      context: maximum number of tokens of prompt and answer; 0 means the limit in the model's
        config, if it has one.
      overflow: action if a prompt is too long, see `fit_prompt`.
      no_repeat_ngram_size: size of n-grams that an answer may contain only once; 0 disables it.
    """

    batch_size: int = 8
    dtype: Dtype | None = None
    device: str | None = None
    context: int = 0
    overflow: Overflow = "error"
    no_repeat_ngram_size: int = 0


class _EncoderTokenizer(ChatTokenizer):
    """The tokenizer of an encoder-decoder; joins turns with newlines and ends texts with EOS."""

    def _encode_turns(self, turns: list[tuple[str, str]], continue_final: bool) -> np.ndarray:
        if continue_final:
            raise PromptError("continue_final is not supported by an encoder-decoder model")
        if not turns:
            raise PromptError("the conversation has no messages")
        return np.asarray(self._encode_text(plain_text(turns), closed=True), np.int32)


@dataclasses.dataclass
class _Row:
    """A request in a batch; ``start`` is when the batch began (seconds of `time.perf_counter`)."""

    index: int
    request: llm.Generate
    prompt: np.ndarray
    truncated: int
    limit: int
    grammar: GrammarState | None
    generator: Any
    start: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    details: list[llm.Token] = dataclasses.field(default_factory=list)
    text: str | None = None  # the text before a stop string, if it contains one
    ended: bool = False

    @property
    def is_finished(self) -> bool:
        return self.ended or len(self.tokens) >= self.limit


class TransformersBackend:
    """Generates and scores with a PyTorch model; see `cirag_jax.llm.types.Backend`.

    ``usage`` is the total over all responses.
    """

    def __init__(
        self, model: Any, tokenizer: ChatTokenizer, config: TransformersConfig | None = None
    ):
        """``model`` is a causal or an encoder-decoder model, already on its device."""
        self.config = config or TransformersConfig()
        self.model = model.eval()
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        if self.is_encoder_decoder and not isinstance(tokenizer, _EncoderTokenizer):
            tokenizer = _EncoderTokenizer(tokenizer.tokenizer, sorted(tokenizer.eos_ids))
        self.tokenizer = tokenizer
        self.usage = llm.Usage()
        positions = getattr(model.config, "max_position_embeddings", None)
        self.context = self.config.context or positions or _UNBOUNDED
        # Replaces the checkpoint's config, which may contain penalties and sampling.
        self._generation_config = transformers.GenerationConfig(
            do_sample=False,
            pad_token_id=self.tokenizer.pad_id,
            eos_token_id=sorted(self.tokenizer.eos_ids),
            decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
        )
        model.generation_config = self._generation_config

    @classmethod
    def open(
        cls,
        model: str,
        *,
        adapter: str | None = None,
        config: TransformersConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "TransformersBackend":
        """Loads a model and, with the library ``peft``, an adapter in PEFT's format.

        ``model`` is a folder, a ``.gguf`` file, ``package:NAME`` or a hub id. ``template_kwargs``
        are variables of its chat template.
        """
        config = config or TransformersConfig()
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_choice("dtype", config.dtype, (None, *get_args(Dtype)))
        name = config.dtype or ("auto" if device.startswith("cuda") else "float32")
        dtype = "auto" if name == "auto" else getattr(torch, name)
        path = resolve_decoder(model)
        try:
            loaded = _load(path, dtype)
            if adapter is not None:
                loaded = _merge_adapter(loaded, adapter)
            loaded = loaded.to(device)
        except ModuleNotFoundError as error:
            raise UserError(f"{model} needs {error.name}, which is not installed.") from None
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{model} cannot be loaded by transformers: {reason}") from error
        tokenizer = ChatTokenizer.load(path, template_kwargs)
        check_tokenizer(tokenizer, loaded.get_input_embeddings().num_embeddings, path)
        return cls(loaded, tokenizer, config)

    def generate(
        self,
        requests: Sequence[llm.Generate],
        progress: llm.OnProgress | None = None,
        done: llm.OnResponse | None = None,
    ) -> list[llm.Generated]:
        """Returns one response per request, in order; failed requests have an ``error``."""
        responses: list[llm.Generated | None] = [None] * len(requests)

        def finish(index: int, response: llm.Generated) -> None:
            responses[index] = response
            self.usage += response.usage
            if done is not None:
                done(index, response)

        rows: list[_Row] = []
        for index, request in enumerate(requests):
            try:
                rows.append(self._prepare(index, request))
            except UserError as error:
                finish(index, llm.failed(str(error)))
        rows.sort(key=lambda row: (len(row.prompt), row.limit))  # reduces padding
        generated = 0
        for first in range(0, len(rows), self.config.batch_size):
            batch = rows[first : first + self.config.batch_size]
            self._run(batch)
            for row in batch:
                finish(row.index, self._response(row))
                generated += len(row.tokens)
            if progress is not None:
                progress(sum(r is not None for r in responses), generated)
        return [response for response in responses if response is not None]

    def score(self, requests: Sequence[llm.Score]) -> list[llm.Scored]:
        """Returns log-probabilities of continuations, with one forward pass for each."""
        responses = [self._score(request) for request in requests]
        self.usage = sum((response.usage for response in responses), self.usage)
        return responses

    def close(self) -> None:
        """Frees the model."""
        del self.model

    def _prepare(self, index: int, request: llm.Generate) -> _Row:
        if request.attention:
            raise PromptError("attention needs backend=jax")
        prompt, truncated = self._fit(request, 1)
        limit = request.max_tokens
        if not self.is_encoder_decoder:
            limit = min(limit, self.context - len(prompt))
        grammar = None
        if request.json_schema is not None:
            grammar = self._grammar.start(request.json_schema)
        generator = torch.Generator().manual_seed(request.seed)
        return _Row(index, request, prompt, truncated, limit, grammar, generator)

    def _fit(self, request: llm.Generate | llm.Score, new_tokens: int) -> tuple[np.ndarray, int]:
        """Fits the prompt into the context, with room for ``new_tokens``; see `fit_prompt`."""
        limit, room = self.context, 0
        if not self.is_encoder_decoder:
            limit -= new_tokens
            room = request.max_tokens - 1 if isinstance(request, llm.Generate) else 0
        return fit_prompt(
            self.tokenizer,
            request.messages,
            limit,
            self.config.overflow,
            request.continue_final,
            room,
        )

    @functools.cached_property
    def _grammar(self) -> JsonGrammar:
        return JsonGrammar(self.tokenizer, self.model.config.vocab_size)

    def _run(self, rows: list[_Row]) -> None:
        start = time.perf_counter()
        for row in rows:
            row.start = start
        length = max(len(row.prompt) for row in rows)
        ids_BS = np.full((len(rows), length), self.tokenizer.pad_id, np.int64)
        mask_BS = np.zeros((len(rows), length), np.int64)
        for i, row in enumerate(rows):
            # A decoder continues its prompts, so their ends are aligned.
            first = 0 if self.is_encoder_decoder else length - len(row.prompt)
            ids_BS[i, first : first + len(row.prompt)] = row.prompt
            mask_BS[i, first : first + len(row.prompt)] = 1
        config = copy.copy(self._generation_config)
        config.max_new_tokens = max(row.limit for row in rows)
        self.model.generate(
            torch.tensor(ids_BS, device=self.model.device),
            attention_mask=torch.tensor(mask_BS, device=self.model.device),
            generation_config=config,
            logits_processor=[_Sampler(self, rows)],
            stopping_criteria=[_StopFinished(rows)],
        )

    def _next_token(self, row: _Row, logits_V: torch.Tensor) -> int:
        """Samples and appends a row's next token; returns padding for a finished row."""
        if row.is_finished:
            return self.tokenizer.pad_id
        token = _sample(row, self._penalize_repeats(row, logits_V))
        row.tokens.append(token)
        request = row.request
        if request.wants_tokens:
            row.details.append(self._describe(logits_V, row))
        if row.grammar is not None:
            row.grammar.advance(token)
            row.ended = row.grammar.is_done
        row.ended = row.ended or token in self.tokenizer.eos_ids
        if request.stop:
            text = self._text(row, row.tokens)
            positions = [text.find(stop) for stop in request.stop if stop in text]
            if positions:
                row.text, row.ended = text[: min(positions)], True
        return token

    def _penalize_repeats(self, row: _Row, logits_V: torch.Tensor) -> torch.Tensor:
        """Lowers the logits of tokens that would repeat an n-gram of the row."""
        size = self.config.no_repeat_ngram_size
        if not size:
            return logits_V
        written_1T: Any = torch.tensor([row.tokens], dtype=torch.long)
        allowed_1V: Any = transformers.NoRepeatNGramLogitsProcessor(size)(
            written_1T,
            logits_V[None],  # pyright: ignore[reportArgumentType]
        )
        return allowed_1V[0].clamp(min=_REPEATED)

    def _describe(self, logits_V: torch.Tensor, row: _Row) -> llm.Token:
        """Describes the row's last token."""
        request, token = row.request, row.tokens[-1]
        logprobs_V = torch.log_softmax(logits_V, -1)
        entropy = None
        if request.entropy:
            entropy = float(torch.special.entr(logprobs_V.exp()).sum())
        top = ()
        if request.top_logprobs:
            values, ids = torch.topk(logprobs_V, min(request.top_logprobs, len(logprobs_V)))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            top = tuple((self.tokenizer.piece(i), i, value) for i, value in pairs)
        logprob = float(logprobs_V[token]) if request.logprobs or request.top_logprobs else None
        offset = len(self._text(row, row.tokens[:-1]))
        return llm.Token(self.tokenizer.piece(token), token, logprob, top, entropy, offset)

    def _text(self, row: _Row, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, continuing=row.request.continue_final)

    def _response(self, row: _Row) -> llm.Generated:
        request, text = row.request, row.text
        if text is None:
            text = self._text(row, row.tokens)
        usage = llm.Usage(
            prompt_tokens=len(row.prompt),
            generated_tokens=len(row.tokens),
            seconds=time.perf_counter() - row.start,
            truncated=int(row.truncated > 0),
        )
        return llm.Generated(
            text,
            "stop" if row.ended else "length",
            usage,
            tokens=tuple(row.details) if request.wants_tokens else None,
        )

    def _score(self, request: llm.Score) -> llm.Scored:
        start = time.perf_counter()
        try:
            continuations = [self.tokenizer.encode(text) for text in request.continuations]
            prompt, truncated = self._fit(request, max(map(len, continuations)))
        except UserError as error:
            return llm.Scored((), error=str(error))
        tokens = tuple(self._score_continuation(prompt, ids) for ids in continuations)
        seconds = time.perf_counter() - start
        usage = llm.Usage(len(prompt), seconds=seconds, truncated=int(truncated > 0))
        return llm.Scored(tokens, usage)

    def _score_continuation(self, prompt: np.ndarray, ids: np.ndarray) -> tuple[llm.Token, ...]:
        device = self.model.device
        with torch.inference_mode():
            ids_T = torch.tensor(ids, dtype=torch.long, device=device)
            prompt_S = torch.tensor(prompt, dtype=torch.long, device=device)
            if self.is_encoder_decoder:
                first = torch.tensor([self.model.config.decoder_start_token_id], device=device)
                decoder_1T = torch.cat([first, ids_T[:-1]])[None]
                logits_TV = self.model(prompt_S[None], decoder_input_ids=decoder_1T).logits[0]
            else:
                both_1S = torch.cat([prompt_S, ids_T])[None]
                logits_TV = self.model(both_1S).logits[0, len(prompt) - 1 : -1]
            logprobs_TV = torch.log_softmax(logits_TV.float(), -1)
            values = logprobs_TV.gather(1, ids_T[:, None])[:, 0].tolist()
        pairs = zip(ids.tolist(), values, strict=True)
        return tuple(llm.Token(self.tokenizer.piece(i), i, value) for i, value in pairs)


class _Sampler(transformers.LogitsProcessor):
    """Samples each row's next token with its request's settings, and masks all other tokens."""

    def __init__(self, backend: TransformersBackend, rows: list[_Row]):
        self._backend, self._rows = backend, rows

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        logits_BV = scores.float().cpu()
        tokens = [self._backend._next_token(row, logits_BV[i]) for i, row in enumerate(self._rows)]
        masked_BV = torch.full_like(scores, -torch.inf)
        return masked_BV.scatter(1, torch.tensor(tokens, device=scores.device)[:, None], 0.0)


class _StopFinished(transformers.StoppingCriteria):
    """Stops rows that have reached their limit, a stop string, or the end of the answer."""

    def __init__(self, rows: list[_Row]):
        self._rows = rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([row.is_finished for row in self._rows], device=input_ids.device)


def _sample(row: _Row, logits_V: torch.Tensor) -> int:
    """Returns the most probable token, or a token sampled from the nucleus."""
    if row.grammar is not None:
        bits = np.unpackbits(row.grammar.mask().view(np.uint8), bitorder="little")
        allowed_V = torch.from_numpy(bits[: len(logits_V)].astype(bool))
        logits_V = logits_V.masked_fill(~allowed_V, -torch.inf)
    temperature, top_p = row.request.temperature, row.request.top_p
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = torch.softmax(logits_V / temperature, -1).sort(descending=True)
    before_V = probabilities_V.cumsum(-1) - probabilities_V
    probabilities_V = probabilities_V.masked_fill(before_V >= top_p, 0.0)
    return int(order_V[torch.multinomial(probabilities_V, 1, generator=row.generator)])


def _load(path: Path, dtype: Any) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    folder = path
    if path.suffix == ".gguf":
        if len(gguf_parts(path)) > 1:
            raise UserError(
                f"{path} is split, which config backend=transformers cannot read; merge the parts "
                "with llama.cpp (llama-gguf-split --merge FIRST_PART OUTPUT) or use backend=jax"
            )
        folder, options["gguf_file"] = path.parent, path.name
    else:
        weight_files(folder)  # rejects pickles, which the library would load
        options["use_safetensors"] = True
    config = transformers.AutoConfig.from_pretrained(
        str(folder), **{k: v for k, v in options.items() if k not in ("dtype", "use_safetensors")}
    )
    kind: Any = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    return kind.from_pretrained(str(folder), trust_remote_code=False, **options)


def _merge_adapter(model: Any, adapter: str) -> Any:
    import peft

    file = tensor_file(Path(adapter))  # rejects pickles and hub ids, which the library would load
    with open_tensors(file) as tensors:
        for name in list(tensors.keys()):
            check_tensor(tensors.get_tensor(name), name, file)
    peft_model = peft.PeftModel.from_pretrained(model, adapter, local_files_only=True)
    return peft_model.merge_and_unload()
