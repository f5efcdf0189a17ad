package nodeapitest

import (
	"fmt"
	"reflect"

	"google.golang.org/grpc"
)

// ServerOptions returns the options that srv was made with, by grpc's names for them. For functions and interfaces the
// value is whether they are set.
func ServerOptions(srv *grpc.Server) (map[string]string, error) {
	opts := reflect.ValueOf(srv).Elem().FieldByName("opts")
	if opts.Kind() != reflect.Struct {
		return nil, fmt.Errorf("options of a %T are not where they were", srv)
	}
	all := make(map[string]string, opts.NumField())
	for i := range opts.NumField() {
		value := opts.Field(i)
		switch value.Kind() { // all others are printed
		case reflect.Func, reflect.Interface:
			all[opts.Type().Field(i).Name] = fmt.Sprint("set: ", !value.IsNil())
			continue
		case reflect.Pointer:
			if !value.IsNil() {
				value = value.Elem()
			}
		}
		all[opts.Type().Field(i).Name] = fmt.Sprint(value)
	}
	return all, nil
}
