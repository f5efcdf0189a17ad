// Package migrations holds the one linear line of schema changes. Numbers are unique across all services; a file is
// never edited after a release. Every statement runs as gpuaas_owner.
package migrations

import "embed"

// FS holds the migration files.
//
//go:embed *.sql
var FS embed.FS
