package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// CheckLaunches checks a launch log's lines of one workspace: each epoch is launched once, and none begins while
// another lives. It returns how many were launched, and the epoch that lives, zero for none.
func CheckLaunches(ledger []Launch, workspaceID string) (int, int64, error) {
	count, live := 0, int64(0)
	launched := map[int64]int{}
	var errs []error
	for _, l := range ledger {
		if l.WorkspaceID != workspaceID {
			continue
		}
		switch l.Op {
		case "intent", "launched":
			if live != 0 && live != l.Epoch {
				errs = append(errs, fmt.Errorf("epoch %d begins while epoch %d lives", l.Epoch, live))
			}
			if l.Op == "launched" {
				launched[l.Epoch]++
				count++
			}
			live = l.Epoch
		case "ended":
			if live == l.Epoch {
				live = 0
			}
		}
	}
	for epoch, n := range launched {
		if n != 1 {
			errs = append(errs, fmt.Errorf("epoch %d was launched %d times", epoch, n))
		}
	}
	return count, live, errors.Join(errs...)
}

// CheckRising checks that no epoch of a workspace was launched after a higher one.
func CheckRising(ledger []Launch, workspaceID string) error {
	var errs []error
	highest := int64(0)
	for _, l := range ledger {
		if l.WorkspaceID != workspaceID || l.Op != "launched" {
			continue
		}
		if l.Epoch <= highest {
			errs = append(errs, fmt.Errorf("epoch %d of workspace %s is launched after epoch %d", l.Epoch, workspaceID, highest))
		}
		highest = l.Epoch
	}
	return errors.Join(errs...)
}

// Launch is one entry of the placement driver's launch log.
type Launch struct {
	Op          string    `json:"op"`
	At          time.Time `json:"at"`
	WorkspaceID string    `json:"workspace_id"`
	Epoch       int64     `json:"epoch"`
	PID         int       `json:"pid"`
}

// ReadLaunches reads the complete lines of a launch log; a last line without its end is not written yet.
func ReadLaunches(file string) ([]Launch, error) {
	data, err := os.ReadFile(file) // of our own mesh
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Launch
	for text := range strings.Lines(string(data)) {
		if !strings.HasSuffix(text, "\n") {
			break
		}
		var l Launch
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return nil, fmt.Errorf("ledger: %w: %s", err, text)
		}
		out = append(out, l)
	}
	return out, nil
}
