package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Unend turns the end of an instance in the launch log of the process driver into the beginning of that end, as if the
// end were incomplete. No line is removed: a launch log that is shorter than the database remembers starts rollback
// mode. It reports whether the end was there.
func Unend(dir, workspaceID string, epoch int64) (bool, error) {
	there := false
	err := rewrite(dir, func(text string, l Launch) string {
		if l.Op != "ended" || l.WorkspaceID != workspaceID || l.Epoch != epoch {
			return text
		}
		there = true
		return strings.Replace(text, `"op":"ended"`, `"op":"ending"`, 1)
	})
	return there, err
}

// Reend puts the end of an instance back in its place, behind its beginning, so that the launch log can be checked
// again.
func Reend(dir, workspaceID string, epoch int64) error {
	begun := false
	return rewrite(dir, func(text string, l Launch) string {
		if l.WorkspaceID != workspaceID || l.Epoch != epoch || l.Op != "ending" {
			return text
		}
		ended := strings.Replace(text, `"op":"ending"`, `"op":"ended"`, 1)
		if begun {
			return ended
		}
		begun = true
		return text + ended
	})
}

// rewrite replaces each line of the launch log of the process driver under the lock that the driver takes for each
// change.
func rewrite(dir string, change func(text string, l Launch) string) (err error) {
	lock, err := os.OpenFile(filepath.Join(dir, "launches.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the ledger: %w", err)
	}
	path := filepath.Join(dir, "launches.jsonl")
	data, err := os.ReadFile(path) // of our own mesh
	if err != nil {
		return err
	}
	var changed strings.Builder
	for text := range strings.Lines(string(data)) {
		var l Launch
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return fmt.Errorf("ledger: %w: %s", err, text)
		}
		changed.WriteString(change(text, l))
	}
	if changed.String() == string(data) {
		return nil
	}
	return os.WriteFile(path, []byte(changed.String()), 0o600)
}
