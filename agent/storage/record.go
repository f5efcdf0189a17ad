package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// errRecord means that a record is empty, cut or otherwise not one that this package wrote.
var errRecord = errors.New("the storage record is not readable")

// unfinished returns the name under which a record is written before it is renamed. No storage can have this name.
func unfinished(rel string) string { return rel + ".new" }

// sweep removes the leftovers of writes that a full disk, a kill or a power cut has ended: every file whose name is not
// one of a record.
func (s *Store) sweep() error {
	err := fs.WalkDir(s.meta.FS(), ".", func(rel string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || recordName(rel) {
			return err
		}
		return s.meta.Remove(rel)
	})
	if err != nil {
		return fmt.Errorf("remove unfinished storage records: %w", err)
	}
	return nil
}

// recordName reports whether a path of the meta tree is that of a record.
func recordName(rel string) bool {
	workspace, name := path.Split(rel)
	return validWorkspace(path.Clean(workspace)) && validName(name)
}

// nextProject returns a project id that no record and no directory has. For a record that cannot be read the id of its
// directory counts, if that has one.
func (s *Store) nextProject() (uint32, error) {
	next := uint32(firstProject)
	err := fs.WalkDir(s.meta.FS(), ".", func(rel string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !recordName(rel) {
			return err
		}
		rec, _, err := s.read(rel)
		if errors.Is(err, errRecord) {
			rec.Project, err = s.projectOf(rel), nil
		}
		next = max(next, rec.Project+1)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("choose project id: %w", err)
	}
	return next, nil
}

// projectOf returns the project id of the storage's directory; zero if it has none that this package gave.
func (s *Store) projectOf(rel string) uint32 {
	if s.deps.Quota == nil {
		return 0
	}
	if project := s.deps.Quota.Project(filepath.Join(s.path, rel)); project >= firstProject {
		return project
	}
	return 0
}

// read returns a record, false if there is none, and errRecord if it is not whole.
func (s *Store) read(rel string) (record, bool, error) {
	data, err := s.meta.ReadFile(rel)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, false, nil
	}
	if err != nil {
		return record{}, false, fmt.Errorf("read storage record: %w", err)
	}
	var rec record
	if err := json.Unmarshal(data, &rec); err != nil {
		return record{}, false, fmt.Errorf("read storage record %s: %w: %w", rel, errRecord, err)
	}
	return rec, true, nil
}

// write replaces a record, so that a crash leaves the old or the new one, and a failed write leaves no other file.
func (s *Store) write(rel string, rec record) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode storage record: %w", err)
	}
	if err := s.meta.MkdirAll(filepath.Dir(rel), 0o700); err != nil {
		return fmt.Errorf("write storage record: %w", err)
	}
	building := unfinished(rel)
	err = s.writeSynced(building, data)
	if err == nil {
		err = s.meta.Rename(building, rel)
	}
	if err != nil {
		if removeErr := s.meta.Remove(building); !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
		return fmt.Errorf("write storage record: %w", err)
	}
	return syncDir(s.meta, filepath.Dir(rel))
}

func (s *Store) writeSynced(rel string, data []byte) error {
	f, err := s.meta.OpenFile(rel, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}
