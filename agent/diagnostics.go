package agent

import (
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/agent/diag"
)

// LedgerFile is the name of the task ledger in the state directory.
const LedgerFile = "ledger.db"

// DiagnosticsFile is the name of the diagnostic record in the state directory.
const DiagnosticsFile = "diagnostics.json"

// Diagnostics reads the record of an agent that may be running: it takes no lock and changes nothing.
func Diagnostics(stateDir string, now time.Time) ([]diag.Entry, error) {
	return diag.Read(filepath.Join(stateDir, DiagnosticsFile), now)
}
