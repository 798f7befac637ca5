"""Retrieval of a key's value from a long text (standard library only).

A text is a row of records `The code of amber falcon is 4821.` among filler
sentences. The answer repeats the record, so a wrong or lost cache entry shows
as a wrong number.
"""

import words

KEYS = [(a, b) for a in words.ADJECTIVES for b in words.NOUNS]
VALUE_DIGITS = 4
# Token counts with the shipped vocabulary, in which each list word is one
# token; make_text only needs them to within a few per cent.
RECORD_TOKENS = 12
FILLER_TOKENS = 8.7


def record(key, value):
    return "The code of %s %s is %s." % (key[0], key[1], value)


def question(key):
    return "What is the code of %s %s?" % key


def draw_value(rng):
    return "".join(str(rng.randint(0, 9)) for _ in range(VALUE_DIGITS))


def filler(rng):
    pick = rng.choice
    kind = rng.randint(0, 2)
    if kind == 0:
        return "The %s %s sat near the %s." % (pick(words.ADJECTIVES), pick(words.NOUNS), pick(words.NOUNS))
    if kind == 1:
        return "%s went to %s in %s with a %s." % (pick(words.NAMES), pick(words.CITIES), pick(words.MONTHS), pick(words.NOUNS))
    return "%s likes the %s %s of %s." % (pick(words.NAMES), pick(words.ADJECTIVES), pick(words.NOUNS), pick(words.NAMES))


def make_sentences(rng, keys, filler_share, tokens):
    """Records for `keys` spread among filler up to about `tokens` tokens."""
    space = tokens
    records, used = {}, 0
    for key in keys:
        records[key] = draw_value(rng)
        used += RECORD_TOKENS
        if used > space * (1.0 - filler_share):
            break
    sentences = [record(key, value) for key, value in records.items()]
    while used + FILLER_TOKENS <= space:
        sentences.append(filler(rng))
        used += FILLER_TOKENS
    rng.shuffle(sentences)
    return sentences, records


def draw_eval(rng, tokens):
    """One held-out question: text of about `tokens` tokens, key and value.

    Half of the asked records stand in the first tenth of the text, where only
    an intact cache still reaches them.
    """
    keys = rng.sample(KEYS, min(len(KEYS), tokens // RECORD_TOKENS + 2))
    share = rng.choice((0.0, 0.3, 0.6, 0.9))
    sentences, records = make_sentences(rng, keys, share, tokens)
    key = rng.choice(sorted(records))
    at = sentences.index(record(key, records[key]))
    if rng.random() < 0.5:
        early = rng.randrange(max(1, len(sentences) // 10))
        sentences[at], sentences[early] = sentences[early], sentences[at]
    return {"text": " ".join(sentences), "key": key, "value": records[key]}


INTRO = "Read these records.\n"


def chat_question(text, key):
    return INTRO + text + "\n" + question(key)


def plain_prompt(text, key):
    return "%s\n\nQuestion: %s\nAnswer:" % (text, question(key))
