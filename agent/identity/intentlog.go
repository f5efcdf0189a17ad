package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// file is a name in one of the two directories.
type file string

const (
	fileEnv            file = "etc/node-agent.env"
	fileBundle         file = "etc/ca-bundle.crt"
	fileBundleOld      file = "etc/ca-bundle.crt.old"
	fileRecoveryBundle file = "etc/recovery-ca-bundle.crt"
	fileRecoveryOld    file = "etc/recovery-ca-bundle.crt.old"
	fileCert           file = "etc/cert.pem"
	fileKey            file = "etc/key.pem"
	fileNextCert       file = "etc/cert-next.pem"
	fileNextKey        file = "etc/key-next.pem"
	filePendingKey     file = "etc/key-pending.pem"
	fileRenewingKey    file = "etc/key-renewing.pem"
	fileRecoveryKey    file = "state/recovery-key.pem"
	fileRecoveringKey  file = "state/key-recovering.pem"
	fileTokens         file = "state/recovery-tokens.json"
	fileNode           file = "state/node.json"
	fileJoinState      file = "state/join-state.json"
	fileServiceRoots   file = "state/service-roots.json"
	fileFormerProfile  file = "state/former-profile.json"
	fileBeforeBundle   file = "state/before-bundle.json"
	fileJournal        file = "state/journal.json"
	fileLock           file = "state/lock"
)

// changeable are the files that an intent log may name: a record that names any other was not written by this package.
var changeable = map[file]bool{
	fileEnv: true, fileBundle: true, fileBundleOld: true, fileRecoveryBundle: true, fileRecoveryOld: true, fileCert: true,
	fileKey: true, fileNextCert: true, fileNextKey: true, filePendingKey: true, fileRenewingKey: true, fileNode: true,
	fileJoinState: true, fileServiceRoots: true, fileRecoveryKey: true, fileRecoveringKey: true, fileTokens: true,
	fileFormerProfile: true,
	fileBeforeBundle:  true,
}

// change is one file's new content, or its removal.
type change struct {
	File    file   `json:"file"`
	Content []byte `json:"content,omitempty"`
	Remove  bool   `json:"remove,omitempty"`
}

type intentLog struct {
	Operation string   `json:"operation"`
	Changes   []change `json:"changes"`
}

const (
	fileMode fs.FileMode = 0o600
	dirMode  fs.FileMode = 0o700
	tmpMark              = ".agent-tmp-"
)

func (s *Store) path(f file) string {
	dir, name, _ := strings.Cut(string(f), "/")
	if dir == "etc" {
		return filepath.Join(s.dirs.Etc, name)
	}
	return filepath.Join(s.dirs.State, name)
}

// commit makes all changes or none. Once the intent log is durable the changes are decided: Open applies them after a
// crash.
func (s *Store) commit(operation string, changes []change) error {
	record, _ := json.Marshal(intentLog{Operation: operation, Changes: changes}) // texts and bytes are always encoded
	if err := s.write(operation, fileJournal, record); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return s.apply(operation, changes)
}

func (s *Store) apply(operation string, changes []change) error {
	for _, c := range changes {
		if c.Remove {
			if err := s.remove(operation, c.File); err != nil {
				return err
			}
			continue
		}
		if err := s.write(operation, c.File, c.Content); err != nil {
			return fmt.Errorf("write %s: %w", c.File, err)
		}
	}
	return s.remove(operation, fileJournal)
}

// replayLocked finishes a decided change that a crash interrupted. A record that is not an intent log of this package
// will not be one the next time either, so it is set aside and reported, and nothing of it is applied. A file that the
// host fails to read now (a path error) may be read later, and stays.
func (s *Store) replayLocked() error {
	data, err := pki.ReadFile(s.path(fileJournal))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if _, host := errors.AsType[*fs.PathError](err); host {
		return fmt.Errorf("read journal: %w", err)
	}
	var record intentLog
	if err == nil {
		record, err = parseIntentLog(data)
	}
	if err != nil {
		return s.setIntentLogAsideLocked(err)
	}
	return s.apply("replay", record.Changes)
}

func parseIntentLog(data []byte) (intentLog, error) {
	var record intentLog
	if err := json.Unmarshal(data, &record); err != nil {
		return intentLog{}, err
	}
	for _, c := range record.Changes {
		if !changeable[c.File] {
			return intentLog{}, fmt.Errorf("it names %q", c.File)
		}
	}
	return record, nil
}

// setIntentLogAsideLocked keeps the file under another name for a person to look at: it may hold the only copy of a
// key.
func (s *Store) setIntentLogAsideLocked(why error) error {
	path := s.path(fileJournal)
	aside := fmt.Sprintf("%s.unreadable-%d", path, time.Now().UnixNano())
	if err := os.Rename(path, aside); err != nil {
		return fmt.Errorf("set journal aside: %w", err)
	}
	if err := pki.SyncDir(filepath.Dir(path)); err != nil {
		return err
	}
	s.problems = append(s.problems,
		fmt.Sprintf("journal.json is unreadable, nothing of it was applied, it is kept as %s: %v", filepath.Base(aside), why))
	return nil
}

// write replaces one file: it writes and syncs the content under another name, renames it, and syncs the directory.
func (s *Store) write(operation string, f file, content []byte) error {
	s.unfinished = true
	path := s.path(f)
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+tmpMark+"0")
	if err := s.step(operation, f, "before_write"); err != nil {
		return err
	}
	if err := s.room.Do(func() error { return writeSynced(tmp, content) }); err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(tmp)))
	}
	if err := s.step(operation, f, "after_fsync"); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("replace file: %w", err)
	}
	if err := s.step(operation, f, "after_rename"); err != nil {
		return err
	}
	if err := pki.SyncDir(filepath.Dir(path)); err != nil {
		return err
	}
	if err := s.step(operation, f, "after_dir_fsync"); err != nil {
		return err
	}
	s.unfinished = false
	return nil
}

func writeSynced(path string, content []byte) error {
	// One writer holds the directory's lock, so a fixed name is enough, and a file that a crash left under it is
	// overwritten. A link planted there is not followed.
	if err := ignoreMissing(os.Remove(path)); err != nil {
		return fmt.Errorf("remove leftover: %w", err)
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fileMode)
	if err != nil {
		return fmt.Errorf("create file: %w", err)
	}
	if _, err = out.Write(content); err == nil {
		err = out.Sync()
	}
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("write file: %w", err)
	}
	return nil
}

func (s *Store) remove(operation string, f file) error {
	s.unfinished = true
	path := s.path(f)
	if err := s.step(operation, f, "before_remove"); err != nil {
		return err
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		s.unfinished = false
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", f, err)
	}
	if err := pki.SyncDir(filepath.Dir(path)); err != nil {
		return err
	}
	if err := s.step(operation, f, "after_remove"); err != nil {
		return err
	}
	s.unfinished = false
	return nil
}

// sweep removes files that a crash left under temporary names.
func (s *Store) sweep() error {
	for _, dir := range []string{s.dirs.Etc, s.dirs.State} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("read directory: %w", err)
		}
		for _, entry := range entries {
			if !strings.HasPrefix(entry.Name(), ".") || !strings.Contains(entry.Name(), tmpMark) {
				continue
			}
			if err := ignoreMissing(os.Remove(filepath.Join(dir, entry.Name()))); err != nil {
				return fmt.Errorf("remove leftover: %w", err)
			}
		}
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
