from typing import Any

from residua import adapt, data, nn, recipes, report, train
from residua.adapt import fade, stream, unfade
from residua.adapt.encoder import create_model
from residua.anatomy import alignment, jacobian_svd
from residua.anatomy.mixing import mixing
from residua.commands.anatomy import anatomy as _anatomy
from residua.commands.compare import compare
from residua.commands.counterfactual import counterfactual
from residua.commands.demo import demo
from residua.commands.diffuse import diffuse
from residua.commands.embed import embed
from residua.commands.evaluate import evaluate as _evaluate
from residua.commands.export import export as _export
from residua.commands.finetune import finetune
from residua.commands.pretrain import pretrain
from residua.commands.run import Run
from residua.commands.sample import sample
from residua.commands.score import score
from residua.commands.segment import segment
from residua.commands.ujm import ujm
from residua.evaluate import entropy_rank, extract, knn, linear_probe, rankme
from residua.nn import alphas
from residua.train.checkpoint import load

__version__: str
__all__ = [
    "Run", "adapt", "alphas", "anatomy", "compare", "counterfactual", "create_model", "data", "demo", "diffuse",
    "embed", "evaluate", "export", "fade", "finetune", "load", "mixing", "nn", "pretrain", "recipes", "report",
    "sample", "score", "segment", "stream", "train", "ujm", "unfade",
]  # fmt: skip

class _Package:
    """Type checkers do not know that a package can be called: the names most used have their types here."""

    def __getattr__(self, name: str) -> Any: ...

class _Anatomy(_Package):
    __call__ = staticmethod(_anatomy)
    alignment = staticmethod(alignment)
    jacobian_svd = staticmethod(jacobian_svd)

class _Export(_Package):
    __call__ = staticmethod(_export)
    export = staticmethod(_export)

class _Evaluate(_Package):
    __call__ = staticmethod(_evaluate)
    entropy_rank = staticmethod(entropy_rank)
    extract = staticmethod(extract)
    knn = staticmethod(knn)
    linear_probe = staticmethod(linear_probe)
    rankme = staticmethod(rankme)

anatomy: _Anatomy
evaluate: _Evaluate
export: _Export
