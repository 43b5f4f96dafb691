"""The numbers: those that everything else leans on, and their names."""

from __future__ import annotations

from mirror.wire import constants as c


def test_dcp_is_one_range_of_opcodes() -> None:
    named = {opcode for opcode in c.Opcode if opcode.name.startswith("DCP_")}
    assert {int(opcode) for opcode in named} == set(range(c.Opcode.DCP_OPEN, c.Opcode.DCP_CACHE_TRANSFER_END + 1))


def test_no_number_has_two_names() -> None:
    for kind in (c.Magic, c.Opcode, c.Status, c.Feature, c.StreamEndReason, c.VbucketRole, c.MarkerVersion):
        assert len(kind.__members__) == len(set(kind)), kind


def test_unknown_numbers_still_have_something_to_be_called() -> None:
    assert c.opcode_name(0x57) == "DCP_MUTATION"
    assert c.opcode_name(0x4F) == "0x4f"
    assert c.status_name(0x23) == "ROLLBACK"
    assert c.status_name(0xFF00) == "0xff00"


def test_the_largest_document_with_its_xattrs_fits_in_a_body() -> None:
    assert c.BODY_LENGTH_MAX > (20 + 1) * 1024 * 1024
    assert c.NO_END_SEQNO == 0xFFFF_FFFF_FFFF_FFFF
