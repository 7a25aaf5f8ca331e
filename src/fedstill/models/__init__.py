"""Networks: one file a family, built by name with `build`."""

from fedstill.models.build import MODELS as MODELS
from fedstill.models.build import FeaturesAndLogits as FeaturesAndLogits
from fedstill.models.build import build as build
from fedstill.models.build import is_own as is_own
from fedstill.models.build import same as same
from fedstill.models.heads import feature_width as feature_width
from fedstill.models.heads import features as features
