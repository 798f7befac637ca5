"""Byte-level BPE of tiny-k2: training and encoding (standard library only).

Kimi's pre-tokenisation pattern is used through the `regex` module where it is
installed; for ASCII text the plain-`re` form below cuts the same pieces.
Merging never joins two digits, so numbers are always single digits.
"""

import base64
import collections
import re

import words

RANKS = 2048
SPECIALS = 256
# Kimi's named special tokens by offset from its first special id:
# name and whether decoding may skip it.
NAMED = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True),
    3: ("<|im_user|>", True), 4: ("<|im_assistant|>", True),
    6: ("<|start_header_id|>", True), 7: ("<|end_header_id|>", True),
    9: ("[EOT]", True), 10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False), 12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False), 14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False), 17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True), 19: ("<|media_content|>", True),
    20: ("<|media_end|>", True), 21: ("<|media_pad|>", True),
    22: ("<think>", False), 23: ("</think>", False),
    254: ("[UNK]", True), 255: ("[PAD]", True),
}
EOS = RANKS + 1
IM_END = RANKS + 2
PAD = RANKS + 255

_ASCII = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
    r"|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
    r"|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+")

KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+"])


def pieces(text):
    """Pre-tokenisation pieces of text that holds no special tokens."""
    if text.isascii():
        return _ASCII.findall(text)
    import regex
    return regex.findall(KIMI_PATTERN, text, regex.V1)


def special_ids():
    """Name → id of all 256 special tokens."""
    out = {}
    for offset in range(SPECIALS):
        name = NAMED.get(offset, ("<|reserved_token_%d|>" % (RANKS + offset), True))[0]
        out[name] = RANKS + offset
    return out


def _byte_order():
    """Printable bytes first, as tiktoken vocabularies have it."""
    first = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    return first + [b for b in range(256) if b not in first]


def _merge_word(symbols, pair):
    out, at = [], 0
    while at < len(symbols):
        if at + 1 < len(symbols) and (symbols[at], symbols[at + 1]) == pair:
            out.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            out.append(symbols[at])
            at += 1
    return tuple(out)


def train(counts):
    """Byte-pair merges on piece counts; returns the list of token bytes by rank."""
    split = {}
    for piece, count in counts.items():
        if not any(ch.isdigit() for ch in piece):
            split[tuple(bytes([b]) for b in piece.encode())] = count
    tokens = [bytes([b]) for b in _byte_order()]
    known = set(tokens)
    while len(tokens) < RANKS:
        pairs = collections.Counter()
        for symbols, count in split.items():
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += count
        if not pairs:
            raise SystemExit("the text holds too few different pieces for the vocabulary")
        pair = max(pairs, key=lambda p: (pairs[p], p))
        merged = pair[0] + pair[1]
        if merged not in known:
            known.add(merged)
            tokens.append(merged)
        changed = {}
        for symbols, count in split.items():
            if pair[0] in symbols:
                symbols = _merge_word(symbols, pair)
            changed[symbols] = changed.get(symbols, 0) + count
        split = changed
    return tokens


def boost(counts, floor):
    """Gives every word of the lists at least `floor` counts, so that it gets a token."""
    spaced = (words.NAMES + words.ITEMS + words.ADJECTIVES + words.NOUNS + words.CITIES
              + words.MONTHS + words.WEATHER + words.COLORS + words.VERBS + words.THINGS)
    for word in spaced:
        counts[" " + word] = max(counts[" " + word], floor)
    for word in words.CITIES + words.NAMES + words.MONTHS + words.COLORS + words.SONGS:
        counts[word] = max(counts[word], floor)


def save(tokens, path):
    with open(path, "w", newline="\n") as out:
        for rank, token in enumerate(tokens):
            out.write("%s %d\n" % (base64.b64encode(token).decode(), rank))


def special_splitter(names):
    """Cuts text at special tokens and keeps them as pieces of their own."""
    ordered = sorted((re.escape(name) for name in names), key=len, reverse=True)
    return re.compile("(%s)" % "|".join(ordered))


class Tokenizer:
    """Encodes text with special tokens; pieces are cached."""

    def __init__(self, path):
        self.ranks = {}
        with open(path) as lines:
            for line in lines:
                token, rank = line.split()
                self.ranks[base64.b64decode(token)] = int(rank)
        self.specials = special_ids()
        self.bytes_of = {rank: token for token, rank in self.ranks.items()}
        self.bytes_of.update({i: name.encode() for name, i in self.specials.items()})
        self._split = special_splitter(self.specials)
        self._cache = {}

    def _merge(self, piece):
        data = piece.encode()
        if data in self.ranks:
            return [self.ranks[data]]
        parts = [bytes([b]) for b in data]
        while len(parts) > 1:
            best = min(range(len(parts) - 1),
                       key=lambda i: self.ranks.get(parts[i] + parts[i + 1], 1 << 30))
            joined = parts[best] + parts[best + 1]
            if joined not in self.ranks:
                break
            parts[best:best + 2] = [joined]
        return [self.ranks[part] for part in parts]

    def encode(self, text):
        out = []
        cache = self._cache
        for chunk in self._split.split(text):
            if chunk in self.specials:
                out.append(self.specials[chunk])
                continue
            for piece in pieces(chunk):
                ids = cache.get(piece)
                if ids is None:
                    ids = cache[piece] = self._merge(piece)
                out.extend(ids)
        return out

    def decode(self, ids):
        return b"".join(self.bytes_of[i] for i in ids).decode("utf-8", "replace")
