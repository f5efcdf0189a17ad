package drill

import (
	"errors"
	"fmt"
)

// Stage is a part of a drill; of a failure, the part that failed.
type Stage string

// The stages, in their order.
const (
	StageGood     Stage = "known_good"
	StageInjected Stage = "injected"
	StageDetected Stage = "detected"
	StageVerdict  Stage = "verdict"
	StageRecover  Stage = "recovered"
	StageEvidence Stage = "evidence"
)

// stageError is the failure of one stage.
type stageError struct {
	stage Stage
	err   error
}

func (e *stageError) Error() string { return fmt.Sprintf("%s: %v", e.stage, e.err) }

func (e *stageError) Unwrap() error { return e.err }

// stageOf returns the stage of which an error is the failure.
func stageOf(err error) (Stage, bool) {
	failed, ok := errors.AsType[*stageError](err)
	if !ok {
		return "", false
	}
	return failed.stage, true
}

// at makes an error the failure of a stage, unless it is one already.
func at(stage Stage, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := stageOf(err); ok {
		return err
	}
	return &stageError{stage, err}
}
