package ledger

import (
	"encoding/binary"
)

// Fence returns the highest epoch seen and the highest op_seq started of a workspace; zeros if nothing was.
//
//nolint:nonamedreturns // two numbers that are easily swapped
func (l *Ledger) Fence(workspaceID string) (epoch, opSeq int64, err error) {
	err = l.store.read(fences, []byte(workspaceID), func(value []byte) error {
		f := readFence(value)
		epoch, opSeq = f.epoch, f.opSeq
		return nil
	})
	return epoch, opSeq, err
}

type fence struct{ epoch, opSeq int64 }

const fenceSize = 16

// fenceOf returns the numbers of the task's workspace, and whether the rule applies to it at all.
func fenceOf(tx *transaction, d *Delivery) (bool, fence) {
	if d.WorkspaceID == "" || Exempt(d.Type) {
		return false, fence{}
	}
	return true, readFence(tx.get(fences, []byte(d.WorkspaceID)))
}

func readFence(value []byte) fence {
	if len(value) != fenceSize {
		return fence{}
	}
	// written from int64
	return fence{epoch: int64(binary.BigEndian.Uint64(value[:8])), opSeq: int64(binary.BigEndian.Uint64(value[8:]))}
}

// refuses reports whether a task is superseded. Equal numbers pass, so that the parallel tasks of one step all run.
func (f fence) refuses(d *Delivery) bool { return d.Epoch < f.epoch || d.OpSeq < f.opSeq }

func (f fence) put(tx *transaction, workspaceID string) {
	value := binary.BigEndian.AppendUint64(make([]byte, 0, fenceSize), uint64(f.epoch)) // not negative
	value = binary.BigEndian.AppendUint64(value, uint64(f.opSeq))                       // not negative
	tx.put(fences, []byte(workspaceID), value)
}
