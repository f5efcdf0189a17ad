package workrules

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// The bounds of a command and an environment. An argument and a variable with its value each stay below what Linux
// takes for one string (128 KiB), and everything together below what fits into the signed task.
const (
	MaxArguments   = 512
	MaxVariables   = 512
	MaxName        = 256
	MaxValue       = 32 << 10
	MaxArgument    = 32 << 10
	MaxTotal       = 256 << 10
	maxShownInText = 64
)

// RunVariable marks, in the environment, every process of one start of a workload. The agent sets it and finds
// processes by it.
const RunVariable = "GPUAAS_WORKLOAD_RUN"

// Kind is why a field is refused.
type Kind int

// The kinds.
const (
	Malformed Kind = iota // it does not have the shape that it must have
	TooLong
	Forbidden // it would change how programs are loaded
	Reserved  // the platform sets it
)

// Problem is one field that is refused.
type Problem struct {
	Field string // of the workload, such as env.LD_PRELOAD or command[0]
	Text  string
	Kind  Kind
}

// String returns the field and what is wrong with it.
func (p Problem) String() string { return p.Field + " " + p.Text }

// Check returns what is wrong with the command and the environment of a workload, in the order of its fields; none if
// it may run.
func Check(w *nodev1.Workload) []Problem {
	out := checkCommand(w)
	total := 0
	for _, word := range slices.Concat(w.GetCommand(), w.GetArgs()) {
		total += len(word)
	}
	if len(w.GetEnv()) > MaxVariables {
		out = append(out, Problem{
			"env", fmt.Sprintf("has %d variables, more than %d", len(w.GetEnv()), MaxVariables),
			TooLong,
		})
	}
	ports := portVariables(w.GetPorts())
	for _, name := range slices.Sorted(maps.Keys(w.GetEnv())) {
		value := w.GetEnv()[name]
		total += len(name) + len(value)
		if p, bad := CheckVariable(name, value); bad {
			out = append(out, p)
		} else if text := reserved(name, ports); text != "" {
			out = append(out, Problem{field(name), text, Reserved})
		}
	}
	if total > MaxTotal {
		out = append(out, Problem{
			"command, args and env",
			fmt.Sprintf("have %d bytes together, more than %d", total, MaxTotal), TooLong,
		})
	}
	return out
}

func checkCommand(w *nodev1.Workload) []Problem {
	var out []Problem
	if len(w.GetCommand()) == 0 && w.GetImage() == "" {
		out = append(out, Problem{"command", "is empty", Malformed})
	}
	if n := len(w.GetCommand()) + len(w.GetArgs()); n > MaxArguments {
		out = append(out, Problem{"command and args", fmt.Sprintf("have %d words, more than %d", n, MaxArguments), TooLong})
	}
	for _, part := range []struct {
		name  string
		words []string
	}{{"command", w.GetCommand()}, {"args", w.GetArgs()}} {
		for i, word := range part.words {
			at := fmt.Sprintf("%s[%d]", part.name, i)
			switch {
			case i == 0 && part.name == "command" && strings.TrimSpace(word) == "":
				out = append(out, Problem{at, "names no program", Malformed})
			case strings.ContainsRune(word, 0):
				out = append(out, Problem{at, "holds a NUL character", Malformed})
			case len(word) > MaxArgument:
				out = append(out, Problem{at, fmt.Sprintf("has %d bytes, more than %d", len(word), MaxArgument), TooLong})
			}
		}
	}
	return out
}

// CheckVariable returns what is wrong with a variable, of a tenant or of the platform; the bool is false if nothing is.
func CheckVariable(name, value string) (Problem, bool) {
	switch {
	case name == "":
		return Problem{"env", "has a variable without a name", Malformed}, true
	case len(name) > MaxName:
		return Problem{field(name), fmt.Sprintf("has a name of %d bytes, more than %d", len(name), MaxName), TooLong}, true
	case !posixName(name):
		return Problem{
			field(name), "is malformed: a name is made of letters, digits and _, and does not begin with a digit",
			Malformed,
		}, true
	case strings.HasPrefix(name, "LD_"):
		return Problem{field(name), "is forbidden: variables that begin with LD_ change how programs are loaded", Forbidden},
			true
	case name == RunVariable || name == "CUDA_VISIBLE_DEVICES":
		return Problem{field(name), "is forbidden: the node's agent sets it and depends on it", Forbidden}, true
	case strings.ContainsRune(value, 0):
		return Problem{field(name), "has a value with a NUL character", Malformed}, true
	case len(value) > MaxValue:
		return Problem{field(name), fmt.Sprintf("has a value of %d bytes, more than %d", len(value), MaxValue), TooLong}, true
	}
	return Problem{}, false
}

// reserved returns why only the platform may set a variable; empty if a tenant may set it.
func reserved(name string, ports map[string]bool) string {
	switch {
	case strings.HasPrefix(name, "GPUAAS_"):
		return "is reserved: names that begin with GPUAAS_ are set by the platform"
	case name == "DATABASE_URL" || name == "PGSCHEMA":
		return "is reserved: the platform sets it to the workspace's own database"
	case ports[name]:
		return "is reserved: the platform sets it to a port of the workload"
	}
	return ""
}

// PortVariable returns the name of the variable that holds the port of a name.
func PortVariable(port string) string {
	return "PORT_" + strings.ToUpper(strings.ReplaceAll(port, "-", "_"))
}

// portVariables returns the variables that the platform sets for the ports.
func portVariables(ports []*nodev1.Port) map[string]bool {
	out := map[string]bool{}
	for _, p := range ports {
		out["PORT"] = true
		if p.GetName() != "" {
			out[PortVariable(p.GetName())] = true
		}
	}
	return out
}

// posixName reports whether name has the shape [A-Za-z_][A-Za-z0-9_]*.
func posixName(name string) bool {
	for i := range len(name) {
		c := name[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

// field returns the name of a variable for a refusal. A malformed name is quoted, and cut.
func field(name string) string {
	if len(name) > maxShownInText {
		end := maxShownInText
		for end > 0 && !utf8.RuneStart(name[end]) {
			end--
		}
		name = name[:end] + "..."
	}
	if posixName(strings.TrimSuffix(name, "...")) {
		return "env." + name
	}
	return fmt.Sprintf("env[%+q]", name)
}
