// Package stage has the stages of a drill and marks an error as the failure of one.
//
// It decides that the first mark of an error stays: an error that is the failure of a stage already is passed on as it
// is. It knows no drill and no mesh.
package stage

import (
	"errors"
	"fmt"
)

// Stage is a part of a drill; of a failure, the part that failed.
type Stage string

// The stages, in their order.
const (
	Good     Stage = "known_good"
	Injected Stage = "injected"
	Detected Stage = "detected"
	Verdict  Stage = "verdict"
	Recover  Stage = "recovered"
	Evidence Stage = "evidence"
)

// stageError is the failure of one stage.
type stageError struct {
	stage Stage
	err   error
}

func (e *stageError) Error() string { return fmt.Sprintf("%s: %v", e.stage, e.err) }

func (e *stageError) Unwrap() error { return e.err }

// Of returns the stage of which an error is the failure.
func Of(err error) (Stage, bool) {
	failed, ok := errors.AsType[*stageError](err)
	if !ok {
		return "", false
	}
	return failed.stage, true
}

// At makes an error the failure of a stage, unless it is one already.
func At(stage Stage, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := Of(err); ok {
		return err
	}
	return &stageError{stage, err}
}
