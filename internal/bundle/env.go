package bundle

import (
	"errors"
	"fmt"
	"strings"
)

// Names of the variables in the environment file of an agent that a bundle sets.
const (
	EnvAPIURL         = "GPUAAS_API_URL"
	EnvTerminalURL    = "GPUAAS_TERMINAL_API_URL"
	EnvRecoveryURL    = "GPUAAS_RECOVERY_API_URL"
	EnvRecoveryBundle = "GPUAAS_RECOVERY_CA_BUNDLE_PATH"
	EnvToken          = "GPUAAS_ENROLLMENT_TOKEN" //nolint:gosec // the name of a variable
	EnvTrustDomain    = "GPUAAS_TRUST_DOMAIN"
	EnvNodeName       = "GPUAAS_NODE_NAME"
)

// Variable is one line of an environment file.
type Variable struct{ Name, Value string }

// RenderEnv returns the environment file with the given variables, without those that are empty. A value that the file
// cannot have is an error, which does not quote it.
func RenderEnv(variables ...Variable) ([]byte, error) {
	var out strings.Builder
	for _, v := range variables {
		if v.Value == "" {
			continue
		}
		for _, r := range v.Value {
			if r < ' ' || r == 0x7f || r == '\uFFFD' || r == '\'' || r == '"' {
				return nil, fmt.Errorf("the value of %s cannot stand in the file", v.Name)
			}
		}
		out.WriteString(v.Name + "='" + v.Value + "'\n")
	}
	if out.Len() > maxEnv {
		return nil, errors.New("the environment file is too large")
	}
	return []byte(out.String()), nil
}
