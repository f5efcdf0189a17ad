package spec

import (
	"fmt"
)

// Attestation is a person's word that nothing of an epoch that cannot be confirmed ended still runs. It is part of the
// run's input, so it is on record with the run.
type Attestation struct {
	Proof  string `json:"fenced_proof"`
	By     string `json:"by"`
	Reason string `json:"reason"`
}

func (w *Attestation) String() string { return fmt.Sprintf("%s, says %s: %s", w.Proof, w.By, w.Reason) }
