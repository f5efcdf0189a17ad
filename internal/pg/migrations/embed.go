// Package migrations holds the one linear line of schema changes. Numbers are unique across all services; a file is
// never edited after a release. Every statement runs as gpuaas_owner.
//
// It only knows the files, so that a service can see whether its database has them; package schema applies them.
package migrations

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// FS holds the migration files.
//
//go:embed *.sql
var FS embed.FS

// Table is the table of the applied migrations. It stands in the schema mesh so that the public one stays empty.
const Table = "mesh.goose_db_version"

// File is one migration.
type File struct {
	Version int64
	Name    string
}

// List returns the migrations of this binary in order.
func List() ([]File, error) {
	names, err := fs.Glob(FS, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	slices.Sort(names)
	files := make([]File, 0, len(names))
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.ParseInt(number, 10, 64)
		if err != nil || version < 1 {
			return nil, fmt.Errorf("the migration %s does not begin with its number", name)
		}
		files = append(files, File{Version: version, Name: name})
	}
	return files, nil
}

// Hash returns a short text that changes whenever a migration file does. Test databases are keyed by it.
func Hash() (string, error) {
	files, err := List()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, f := range files {
		b, err := fs.ReadFile(FS, f.Name)
		if err != nil {
			return "", fmt.Errorf("read migration: %w", err)
		}
		_, _ = fmt.Fprintf(h, "%s %d\n", f.Name, len(b)) // a hash never fails
		_, _ = h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}
