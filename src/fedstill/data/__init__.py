"""Labelled images from many sources (:func:`load`), and the rules that deal them to clients (:func:`split`)."""

from fedstill.data.names import KNOWN as KNOWN
from fedstill.data.own import from_torch as from_torch
from fedstill.data.partition import class_counts as class_counts
from fedstill.data.partition import local_test_split as local_test_split
from fedstill.data.partition import split as split
from fedstill.data.sources import DataSet as DataSet
from fedstill.data.sources import load as load
