package saga

import (
	"fmt"
	"time"
)

func doing(phase, step string) string {
	if phase == phaseUndo {
		return fmt.Sprintf("undoing the step %q", step)
	}
	return fmt.Sprintf("doing the step %q", step)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
