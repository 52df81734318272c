"""A tiny XLM-R classifier that calls sentences with an exclamation mark opinions."""

import json

import torch
import transformers

from tests.models.test_cross_encoder import _folder


def write_classifier(folder, names=("LABEL_0", "LABEL_1")):
    """Writes the model; ``names[1]`` is the label of facts.

    Attention averages all tokens. Only the exclamation mark has an embedding.
    """
    _folder(folder, "xlm-roberta", labels=2)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"] = vocabulary.pop("z")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("LayerNorm.weight" in name))
        encoder = model.roberta
        encoder.embeddings.word_embeddings.weight[vocabulary["!"], 0] = 1.0
        for layer in encoder.encoder.layer:
            for linear in (layer.attention.self.value, layer.attention.output.dense):
                linear.weight.copy_(torch.eye(len(linear.weight)))
        head = model.classifier
        head.dense.weight[0, 0] = 1.0
        head.out_proj.weight[:, 0] = torch.tensor([1.0, -1.0])
        head.out_proj.bias[1] = 0.5
    model.save_pretrained(folder)
    return folder
