"""Translation: every token of a target sentence is predicted from its source and the tokens before it."""

from torchdefine.tasks.translation.beam import BeamConfig, beam_search
from torchdefine.tasks.translation.data import open_bitext
from torchdefine.tasks.translation.lines import (
    LongLine,
    Translation,
    TranslationOptions,
    TranslationScores,
    require_sacrebleu,
    score_translations,
    translate_lines,
)
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.recipe import TranslationRecipe
from torchdefine.tasks.translation.run import TranslationEvaluation, TranslationRun
from torchdefine.tasks.translation.task import TranslationTask, build_translator
