from enginery.validate.cases import Case
def real_cases(artifact, record, config): return []
