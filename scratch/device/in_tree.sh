# bash .dev2/in_tree.sh TREE command...: in an unpacked tree, with its own package and cache
n=$1; shift; cd /tmp/t/$n; e=/opt/tkq-env:/opt/tkq-env/nvidia_cutlass_dsl/dsl_packages
export PYTHONPATH=/tmp/t/$n:$e TKQ_CACHE_DIR=/tmp/tkqc_$n; exec "$@"
